"""Input processing: prompts and parameters that are accepted, and those that are refused."""

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.input_processor import TOO_LONG, EngineRequest, InputProcessor
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.tokenizer.tokenizer import Tokenizer
from fleetfoot.utils.validation import FieldError

VOCAB, MAX_LEN, EOS = 100, 32, 2
TOKENIZER = Tokenizer.from_path(embedded_model_path())


def processor_of(**changes: Any) -> InputProcessor:
    limits = {"vocab_size": VOCAB, "max_model_len": MAX_LEN, "max_logprobs": 5, "eos_token_ids": [EOS, 1_000_000]}
    return InputProcessor(**{**limits, "tokenizer": None, "seed": 0, "wall_clock": lambda: 123.0, **changes})


def with_text(**changes: Any) -> InputProcessor:
    return processor_of(tokenizer=TOKENIZER, vocab_size=len(TOKENIZER), **changes)


def process(prompt: Any, processor: InputProcessor | None = None, priority: int = 0, **params: Any) -> EngineRequest:
    return (processor or processor_of()).process("r", prompt, SamplingParams(**params), priority=priority)


def sequences(prompt: Any, processor: InputProcessor | None = None, **params: Any) -> list[Request]:
    """The requests that the scheduler gets."""
    processor = processor or processor_of()
    return processor.make_requests(process(prompt, processor, **params))


ARRAYS = [array("q", [5, 6, 7]), np.array([5, 6, 7]), np.array([5, 6, 7], dtype=np.uint8), torch.tensor([5, 6, 7])]
LISTS = [[5, 6, 7], (5, 6, 7), range(5, 8), iter([5, 6, 7]), [np.int64(5), np.int32(6), 7]]
DICTIONARIES = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": np.array([5, 6, 7]), "cache_salt": None}]


@pytest.mark.parametrize("prompt", [*ARRAYS, *LISTS, *DICTIONARIES], ids=lambda prompt: repr(prompt).split(" at 0x")[0])
def test_token_ids(prompt: Any) -> None:
    processor = processor_of()
    request = process(prompt, processor, n=2)
    assert (request.prompt, request.prompt_token_ids) == (None, array("i", [5, 6, 7]))
    assert (request.arrival_time, request.prompt_token_ids.itemsize) == (123.0, 4)
    for index, sequence in enumerate(processor.make_requests(request)):
        assert sequence.prompt_token_ids is request.prompt_token_ids  # all sequences share them
        assert (sequence.request_id, sequence.num_prompt_tokens) == (f"r\x1f{index}", 3)
        assert (sequence.cache_salt, sequence.priority) == (None, 0)
    if isinstance(prompt, list):
        prompt.append(8)
        assert request.prompt_token_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "truncate", "kept"),
    [
        ([1, 0, 1], None, [1, 0, 1]),  # not booleans
        (np.array([0, 1]), None, [0, 1]),
        (range(40), 1, [39]),
        (range(40), 4, [36, 37, 38, 39]),
        (range(40), -1, list(range(24, 40))),  # 16 of 32 are for the output
        ([5, 6], 35, [5, 6]),
        ({"prompt": "shown", "prompt_token_ids": [5]}, None, [5]),
    ],
)
def test_tokens_that_are_kept(prompt: Any, truncate: int | None, kept: list[int]) -> None:
    request = process(prompt, truncate_prompt_tokens=truncate)
    assert request.prompt_token_ids.tolist() == kept
    assert request.prompt == ("shown" if isinstance(prompt, dict) else None)


IDS, ALLOWED = "prompt_token_ids", "allowed_token_ids"


@pytest.mark.parametrize(
    ("prompt", "error", "field"),
    [
        ([], ValueError, "prompt"),
        ({IDS: []}, ValueError, "prompt"),
        ({}, ValueError, "prompt"),
        ({"prompt": None}, ValueError, "prompt"),
        ({"prompt_ids": [5]}, ValueError, "prompt"),
        ({"prompt": b"a"}, TypeError, "prompt"),
        ({IDS: "5 6"}, TypeError, IDS),
        ({IDS: [5], "cache_salt": 5}, ValueError, "cache_salt"),
        ({"prompt": "a", "cache_salt": ""}, ValueError, "cache_salt"),
        (5, TypeError, "prompt"),
        ({IDS: bytearray(8)}, TypeError, IDS),
        ({IDS: {5, 6}}, TypeError, IDS),
        ({IDS: np.array(5)}, TypeError, IDS),
        ([5, "6"], TypeError, f"{IDS}[1]"),
        ([5, 6.0], TypeError, f"{IDS}[1]"),
        ([5, None], TypeError, f"{IDS}[1]"),
        ([5, [6]], TypeError, f"{IDS}[1]"),
        ([5, 2**63], ValueError, f"{IDS}[1]"),
        ([np.int64(5), "6"], TypeError, f"{IDS}[1]"),
        ([torch.tensor(5), torch.tensor(6.5)], TypeError, f"{IDS}[1]"),
        (np.array([[5, 6]]), TypeError, "prompt"),
        ([5, True], TypeError, f"{IDS}[1]"),
        ({IDS: [False, 5]}, TypeError, f"{IDS}[0]"),
        ([True, "6"], TypeError, f"{IDS}[0]"),
        (np.array([True, False]), TypeError, f"{IDS}[0]"),
        (torch.tensor([False, True]), TypeError, f"{IDS}[0]"),
        (iter([5, True]), TypeError, f"{IDS}[1]"),
        ([5, -1], ValueError, f"{IDS}[1]"),
        ([5, 100], ValueError, f"{IDS}[1]"),
        ("text", ValueError, "prompt"),
    ],
    ids=lambda value: repr(value).split(" at 0x")[0][:40] if not isinstance(value, type) else "",
)
def test_prompts_that_are_refused(prompt: Any, error: type[Exception], field: str) -> None:
    given = prompt[IDS] if isinstance(prompt, dict) and IDS in prompt else prompt
    with pytest.raises(error) as raised:
        process(prompt)
    assert isinstance(raised.value, FieldError) and raised.value.field == field
    _, _, position = field.partition("[")
    if position and not hasattr(given, "__next__"):  # which is exhausted
        assert raised.value.value == given[int(position.removesuffix("]"))]


def test_texts_that_are_refused() -> None:
    with pytest.raises(FieldError):
        processor_of(tokenizer=SimpleNamespace(encode=lambda text: [])).tokenize("")
    # a tokenizer can have more tokens than the model
    with pytest.raises(FieldError) as raised:
        process("Once upon a time", processor_of(tokenizer=TOKENIZER))
    assert raised.value.field.startswith(IDS) and raised.value.value >= VOCAB


def test_texts_that_are_too_long_are_refused_before_they_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(map(len, TOKENIZER.get_vocab()))

    def is_too_long(*arguments: Any, field: str = "prompt", **options: Any) -> bool:
        with pytest.raises(FieldError) as raised:
            process(*arguments, **options)
        return (raised.value.field, raised.value.code) == (field, TOO_LONG)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", None)
        for prompt in ("a" * (31 * longest + 1), {"prompt": "a" * 10**7}):
            assert is_too_long(prompt, with_text())
        assert is_too_long([5], with_text(), field="bad_words", bad_words=["a" * 1000])
    assert is_too_long("a" * 31 * longest, with_text())
    assert process("<|assistant|>" * 30, with_text()).prompt_token_ids.tolist()[1:] == [4] * 30
    assert len(process("a" * 1000, with_text(), truncate_prompt_tokens=3).prompt_token_ids) == 3
    tokenizer = Tokenizer.from_path(embedded_model_path())
    tokenizer.backend.add_tokens(
        [long := "x" * 100]
    )  # with such a token, only the beginning of a text shows its length
    vocabulary = {"tokenizer": tokenizer, "vocab_size": len(tokenizer)}
    assert is_too_long("a1" * 1500, processor_of(**vocabulary))
    assert len(process(long * 29, processor_of(**vocabulary)).prompt_token_ids) == 30
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>")))
    assert tokenizer.max_token_chars is None  # one token for a word of any length
    assert len(process("a" * 1000, processor_of(tokenizer=tokenizer)).prompt_token_ids) == 1


def test_seeds() -> None:
    first, second = processor_of(), processor_of()

    def seeds(processor: InputProcessor, **params: Any) -> list[int]:
        return [sequences([5], processor, **params)[0].seed for _ in range(3)]

    unseeded = seeds(first)
    assert len(set(unseeded)) == 3
    assert seeds(second) == unseeded  # they depend on the engine's seed and the order only
    assert not set(seeds(first)) & set(unseeded)
    assert not set(seeds(processor_of(seed=1))) & set(unseeded)
    assert len(set(seeds(first, seed=9))) == 1
    assert seeds(first, seed=9) == seeds(processor_of(seed=5), seed=9)
    assert all(0 <= seed < 2**64 for seed in unseeded)
    copies = sequences([5], n=3, seed=1)
    assert len({sequence.seed for sequence in copies}) == 3
    assert copies[0].seed == sequences([5], seed=1)[0].seed


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([5], {"stop": ["a"]}, "stop"),
        ([5], {"logprobs": 6}, "logprobs"),
        ([5], {"logit_bias": {100: 1}}, "logit_bias"),
        (range(40), {"truncate_prompt_tokens": 35}, "prompt"),
        ([5], {"allowed_token_ids": [EOS], "min_tokens": 5}, ALLOWED),
        ([5], {"allowed_token_ids": [EOS, 9], "min_tokens": 1, "stop_token_ids": [9]}, ALLOWED),
        (
            [5],
            {"allowed_token_ids": [9], "min_tokens": 1, "stop_token_ids": [9], "ignore_eos": True},
            "allowed_token_ids",
        ),
        ([5] * 25, {"min_tokens": 10}, "min_tokens"),
    ],
    ids=str,
)
def test_parameters_that_do_not_suit_the_model(prompt: Any, params: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as raised:
        process(prompt, **params)
    assert raised.value.field == field


@pytest.mark.parametrize("wrong", [None, {}, "params", SamplingParams])
def test_parameters_of_another_type(wrong: Any) -> None:
    with pytest.raises(TypeError, match="it must be a SamplingParams"):
        processor_of().process("r", [5], wrong)


@pytest.mark.parametrize("wrong", [1.5, "1", None, True])
def test_priorities_are_ints(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"priority is .*; it must be an int"):
        process([5], priority=wrong)


def test_bad_words_in_both_spellings_are_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, words, encode = with_text(), [], TOKENIZER.encode

    def record(text: str, **options: Any) -> list[int]:
        words.append(text)
        return encode(text, **options)

    monkeypatch.setattr(TOKENIZER, "encode", record)
    checked = processor.check_params(SamplingParams(bad_words=["fox"]))
    first, second = (processor.process(name, [5], checked, params_checked=True) for name in ("a", "b"))
    assert words == ["fox", " fox"]
    (sequence,) = processor.make_requests(first)
    assert sequence.bad_words_token_ids == [encode(word, add_special_tokens=False) for word in words]
    assert first.bad_words_token_ids == second.bad_words_token_ids
