"""Texts that are cut before they are tokenized have the tokens of the whole at the end that is kept."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_builders import BACKENDS, CORPUS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.input_processor import TOO_LONG, InputProcessor
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.tokenizer import cutting
from fleetfoot.tokenizer import tokenizer as tokenizer_module
from fleetfoot.tokenizer.cutting import text_cutter
from fleetfoot.tokenizer.tokenizer import Tokenizer as TextTokenizer
from fleetfoot.utils.validation import FieldError

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS: dict[str, list[str]] = {
    "qwen": [f"{CONTRACTIONS}|{GPT4 % ''}"],
    "llama3": [f"{CONTRACTIONS}|{GPT4 % '{1,3}'}"],
    "gpt4o": [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
}
"""The expressions of real tokenizers' files."""


def split_backend(patterns: list[str], behavior: Any = "isolated") -> Tokenizer:
    backend = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), behavior) for pattern in patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    return backend


def gemma_backend() -> Tokenizer:
    """BPE whose spaces are marks, without a pre-tokenizer that has an effect."""
    backend = BACKENDS["byte_fallback"]()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return backend


FORMS: dict[str, Callable[[], Tokenizer]] = {
    **{name: lambda patterns=patterns: split_backend(patterns) for name, patterns in PATTERNS.items()},
    "gemma": gemma_backend,
    "llama2": BACKENDS["byte_fallback"],
    "metaspace": BACKENDS["metaspace"],
    "embedded": lambda: Tokenizer.from_file(str(embedded_model_path() / "tokenizer.json")),
}
MADE = {name: make() for name, make in FORMS.items()}
PIECES = [
    *(
        "a",
        "the",
        "Fox",
        "'s",
        "'ll",
        " ",
        "  ",
        "\n",
        " \n",
        "\n\n",
        "\t",
        "12",
        "1234",
        ".",
        "...",
        "!?",
        "(",
        "\r\n",
    ),
    *(
        "\u3002",
        "\uff0c",
        "你好",
        "中",
        "こ",
        "é",
        "e\u0301",
        "\u0301",
        "привет",
        " и",
        "<|im_end|>",
        "<s>",
        "</s>",
        "▁",
    ),
    *("\u00a0", "😀", "한", "_", "-", "x", "' s", "I'M", "/", " the", " fox", " of", "\ufb01", "\uff21", "ß", "İ"),
]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=120).map("".join)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "_LEAST_PIECE", 8)
    monkeypatch.setattr(cutting, "_MOST_PIECE", 32)


@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_that_are_kept_are_those_of_the_whole(form: str) -> None:
    backend = MADE[form]
    cutter = text_cutter(backend)
    assert cutter is not None
    num_cut = 0

    @settings(max_examples=250, deadline=None)
    @given(text=TEXTS, most=st.integers(1, 40))
    def check(text: str, most: int) -> None:
        def ids(one: str) -> list[int]:
            return backend.encode(one, add_special_tokens=False).ids

        nonlocal num_cut
        last, first = cutter.last(text, most), cutter.first(text, most)
        assert ids(last)[-most:] == ids(text)[-most:]
        assert ids(first)[:most] == ids(text)[:most]
        assert [token for part in cutter.parts(text) for token in ids(part)] == ids(text)
        num_cut += (len(last) < len(text)) + (len(first) < len(text))

    check()
    assert num_cut


def test_only_what_is_kept_is_tokenized() -> None:
    cutter = text_cutter(MADE["qwen"])
    assert cutter is not None
    counted: list[int] = []
    limited = cutting.TextCutter(cutter.places, cutter.drops_space, lambda text: counted.append(len(text)) or 8)
    text = "the little fox " * 100_000
    for cut in (limited.last, limited.first):
        counted.clear()
        assert len(cut(text, 40)) == sum(counted) < 1000
        assert max(counted) < 100


def test_long_texts_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text, lengths, parts = "The little fox's den, 12 of them.\n\n" * 300, [], cutting.TextCutter.parts
    tokenizers = [TextTokenizer(MADE[form]) for form in FORMS]
    expected = [one.encode(text, add_special_tokens=adds) for one in tokenizers for adds in (True, False)]
    monkeypatch.setattr(tokenizer_module, "_LONG_IN_PARTS", len(text))
    monkeypatch.setattr(cutting.TextCutter, "parts", lambda *args: (lengths.append(len(x)) or x for x in parts(*args)))
    assert [one.encode(text, add_special_tokens=adds) for one in tokenizers for adds in (True, False)] == expected
    assert max(lengths) < 100
    with pytest.raises(FieldError, match=f"at position {len(text)} "):
        tokenizers[0].encode(text + "\ud800")


def with_added(token: AddedToken) -> Tokenizer:
    backend = split_backend(PATTERNS["qwen"])
    backend.add_tokens([token])
    return backend


UNKNOWN: dict[str, Callable[[], Tokenizer]] = {
    "another expression": lambda: split_backend([r"\w+ \w+|\s+|."]),
    "another behavior": lambda: split_backend(PATTERNS["qwen"], "merged_with_next"),
    "a token of words": lambda: with_added(AddedToken("a spaced token")),
    "a token with the space around": lambda: with_added(AddedToken("<mask>", lstrip=True)),
    "tokens across words": lambda: split_backend([r"\p{N}{1,3}"]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_tokenizers_of_which_no_place_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = UNKNOWN[name]()
    assert text_cutter(backend) is None
    tokenizer = TextTokenizer(backend)
    text = "the fox " * 1000
    assert tokenizer.cut(text, 5, "left") == text
    monkeypatch.setattr(cutting, "_MOST_UNCUT", 7999)
    for call in (lambda: tokenizer.cut(text, 5, "left"), lambda: tokenizer.check_parts(text)):
        with pytest.raises(ValueError, match=r"^prompt has 8,000 characters"):
            call()


def test_a_text_without_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TextTokenizer(MADE["qwen"])
    assert tokenizer.cut("a" * 9000, 5, "left") == "a" * 9000
    monkeypatch.setattr(cutting, "_MOST_UNCUT", 8000)
    for side in ("left", "right"):
        with pytest.raises(ValueError, match="without a place where it can be cut"):
            tokenizer.cut("a" * 9000, 5, side)
    monkeypatch.setattr(cutting, "_MOST_PIECE", 1000)
    tokenizer.check_parts("the fox " * 2000)
    with pytest.raises(ValueError, match="prompt has 9,00"):
        tokenizer.check_parts("the fox " * 1000 + "1" * 8000 + " the fox" * 1000)


def test_prompts_that_are_truncated() -> None:
    backend = MADE["embedded"]
    tokenizer = TextTokenizer(tokenizers.Tokenizer.from_str(json.dumps(json.loads(backend.to_str()))))
    processor = InputProcessor(
        vocab_size=len(tokenizer), max_model_len=100, eos_token_ids=(), tokenizer=tokenizer, max_logprobs=5, seed=0
    )
    text = CORPUS[0] + " Once upon a time there was a fox. " * 3000
    whole = tokenizer.encode(text)
    for keep in (1, 7, 99, -1):
        request = processor.process("r", text, SamplingParams(truncate_prompt_tokens=keep))
        assert list(request.prompt_token_ids) == whole[-(84 if keep == -1 else keep) :]  # 16 of 100 are for the output
    with pytest.raises(FieldError) as raised:
        processor.process("r", text, SamplingParams(truncate_prompt_tokens=100))
    assert (raised.value.field, raised.value.code) == ("prompt", TOO_LONG)
