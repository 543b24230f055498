"""The tokenizer gives the ids and texts of transformers' fast tokenizers on the same files."""

import copy
import functools
import logging
import pickle
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers.processors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_builders import BACKENDS, CORPUS, byte_level_backend, save, word_level_backend

from fleetfoot.assets import embedded_model_path
from fleetfoot.tokenizer.tokenizer import Tokenizer

TEXTS = [
    *CORPUS[:5],
    "",
    " ",
    "   leading and trailing   ",
    "<|begin|>spelled out<|im_end|>\n<think>a spaced token</think>",
    "<s>a</s> b<unk>",
    "the fox runs . café",
    "\x00\ufffd\u2028 \U0001f469\u200d\U0001f469\u200d\U0001f467",
]


def load_both(folder: Path) -> tuple[Tokenizer, Any]:
    from transformers import AutoTokenizer

    return Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)


@functools.cache
def both(kind: str) -> tuple[Tokenizer, Any]:
    with tempfile.TemporaryDirectory() as folder:
        names = {"byte_level": ("<|begin|>", "<|end|>"), "byte_fallback": ("<s>", "</s>")}
        bos, eos = names.get(kind, (None, "</s>"))
        return load_both(save(BACKENDS[kind](), Path(folder), bos_token=bos, eos_token=eos))


def assert_same_text(kind: str, text: str) -> None:
    ours, theirs = both(kind)
    num_chars = ours.max_token_chars
    assert (num_chars is not None) == kind.startswith("byte")
    for add_special_tokens in (True, False):
        ids = ours.encode(text, add_special_tokens=add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        assert num_chars is None or len(text) <= len(ids) * num_chars
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", BACKENDS)
def test_known_texts_and_the_vocabulary_match_transformers(kind: str) -> None:
    for text in TEXTS:
        assert_same_text(kind, text)
    ours, theirs = both(kind)
    assert (ours.vocab_size, len(ours)) == (theirs.vocab_size, len(theirs))
    for name in ("bos_token", "bos_token_id", "eos_token", "eos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert theirs.all_special_ids == ours.all_special_ids
    for token_id in range(len(ours)):
        token = ours.convert_ids_to_tokens(token_id)
        assert token == theirs.convert_ids_to_tokens(token_id)
        assert token is not None
        assert ours.convert_tokens_to_ids(token) == token_id


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=40)
@given(text=st.text(max_size=40))
def test_any_text_matches_transformers(kind: str, text: str) -> None:
    assert_same_text(kind, text)


CONFIGS: dict[str, dict[str, Any]] = {
    "add_bos_token off": {"add_bos_token": False},
    "add_eos_token on": {"add_bos_token": True, "add_eos_token": True},
    "new named tokens": {"eos_token": "<|new_eos|>", "pad_token": "<|pad|>"},
    "token as dict": {"eos_token": {"__type": "AddedToken", "content": "<|end|>", "lstrip": False}},
    "named token from the plain vocabulary": {"unk_token": "a"},
    "extra tokens": {"extra_special_tokens": ["<x>", "<think>"]},
    "additional tokens": {"additional_special_tokens": ["<x>", "<y>"]},
    "model's own tokens": {"extra_special_tokens": {"image_token": "<image>"}},
    "model's own token at the top": {"audio_token": "<audio>"},
    "added tokens with other flags": {
        "added_tokens_decoder": {"400": {"content": "<think>", "special": True}, "9": {"content": "<new>"}}
    },
    "special tokens are split": {"split_special_tokens": True},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_config_is_read_as_transformers_reads_it(tmp_path: Path, config: dict[str, Any]) -> None:
    ours, theirs = load_both(save(byte_level_backend(), tmp_path, bos_token="<|begin|>", **config))
    assert ours.backend.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    text = "<|begin|>a <think>b</think><|end|><|new_eos|><x><y><image><audio><new>a spaced token<|pad|>"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_a_named_tokenizer_json_is_loaded_with_the_files_beside_it(tmp_path: Path) -> None:
    folder = save(byte_level_backend(), tmp_path, eos_token="<|end|>")
    assert Tokenizer.from_path(folder / "tokenizer.json").eos_token_id == 1
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.from_path(str(folder)).eos_token_id is None


@pytest.mark.parametrize(
    ("files", "path", "words"),
    [
        (["tokenizer.model", "config.json"], "", ["config.json, tokenizer.model", "skip_tokenizer_init=True"]),
        ([f"shard-{i:02}.safetensors" for i in range(30)], "", ["shard-00.safetensors", "and 10 more"]),
        ([], "", ["the folder is empty"]),
        ([], "nowhere", ["no such file or folder"]),
        (["tokenizer.model"], "tokenizer.model", ["a file of another kind"]),
    ],
)
def test_without_tokenizer_json_files_are_listed(tmp_path: Path, files: list[str], path: str, words: list[str]) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError) as caught:
        Tokenizer.from_path(tmp_path / path)
    for word in [str(tmp_path), "tokenizer.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "not json", "not a file of the tokenizers library"),
        ("tokenizer.json", "{}", "not a file of the tokenizers library"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "holds a JSON list, not an object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template .* is a int"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}', "chat_template .* is a list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}', "must map token ids"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": "a"}}', "must map token ids"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("special_tokens_map.json", "3", "holds a JSON int"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    folder = save(byte_level_backend(), tmp_path)
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_path(folder)
    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize("tokens", [[3], "<x>", [["<x>"]]])
def test_broken_extra_special_tokens_are_shown(tmp_path: Path, tokens: Any) -> None:
    with pytest.raises(ValueError, match="extra_special_tokens"):
        Tokenizer.from_path(save(byte_level_backend(), tmp_path, extra_special_tokens=tokens))


def test_added_tokens_that_the_file_does_not_add_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_path(save(byte_level_backend(), tmp_path / "none", **names, add_eos_token=False))
        assert not caplog.records
        Tokenizer.from_path(save(byte_level_backend(), tmp_path / "end", **names, add_eos_token=True))
    assert ["add_eos_token" in message and "after a text" in message for message in caplog.messages] == [True]
    caplog.clear()
    backend = byte_level_backend()
    ids = [(token, backend.token_to_id(token)) for token in names.values()]
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|begin|> $A <|end|>", special_tokens=ids)
    Tokenizer.from_path(save(backend, tmp_path / "both", **names, add_bos_token=True, add_eos_token=True))
    assert not caplog.records


def test_settings_that_are_not_applied_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_path(save(byte_level_backend(), tmp_path / "bpe", clean_up_tokenization_spaces=True))
        assert not caplog.records
        Tokenizer.from_path(save(word_level_backend(), tmp_path / "words", clean_up_tokenization_spaces=True))
        Tokenizer.from_path(save(byte_level_backend(), tmp_path / "regex", fix_mistral_regex=True))
    assert ["clean_up" in caplog.messages[0], "fix_mistral_regex" in caplog.messages[1]] == [True, True]


@functools.cache
def embedded() -> tuple[Tokenizer, Any]:
    ours, theirs = load_both(embedded_model_path())
    ours.tensor_types["pt"] = torch.tensor
    return ours, theirs


def plain(value: Any) -> Any:
    """Tensors as lists, with their type."""
    if isinstance(value, Mapping):
        return {name: plain(column) for name, column in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return (type(value), value.dtype, value.tolist()) if hasattr(value, "tolist") else value


TALK = [{"role": "user", "content": " Tell me a story "}, {"role": "assistant", "content": "Once upon a time"}]
TALKS = (TALK, [TALK, TALK[:1]])
IDS = ([0, 300, 1], 300, [[0, 300], [301]], np.array([[0, 300]]), torch.tensor([[300], [0]]), [], [0, np.int64(300)])
LONG = "Once upon a time a little fox lived in a wood"
TEXTS = ["one", LONG]
FURTHER_COLUMNS = [f"return_{name}" for name in ("offsets_mapping", "special_tokens_mask", "token_type_ids", "length")]
CALLS: list[Callable[[Any], Any]] = [
    lambda t: [t(LONG), t([LONG]), t((LONG, "a")), t(LONG, return_attention_mask=False), t(text=LONG)],
    lambda t: [t(LONG, None, stride=0, is_split_into_words=False, verbose=True, text_target=None)],
    lambda t: [t(LONG, return_tensors="pt"), t(LONG, return_tensors="np"), t([LONG, "a"], padding=False)],
    lambda t: [t([LONG, LONG], return_tensors="pt"), t.encode(LONG, return_tensors="np")],
    lambda t: [t.encode(LONG, None, adds) for adds in (True, False)] + [t.encode([LONG, "a"])],
    lambda t: [t.decode(ids) for ids in IDS] + [t.decode(ids, True) for ids in IDS],
    lambda t: [t.decode([0, 300], skip_special_tokens=True, clean_up_tokenization_spaces=False), t.decode(t(LONG))],
    lambda t: [t.batch_decode(ids, skip_special_tokens=skip) for ids in IDS[2:4] for skip in (True, False)],
    lambda t: [t.convert_ids_to_tokens(ids) for ids in (300, [0, 300, 3], torch.tensor([1, 400]))],
    lambda t: t.convert_ids_to_tokens([0, 300, 3], True) + t.convert_ids_to_tokens([1], skip_special_tokens=True),
    lambda t: [t.convert_tokens_to_ids(tokens) for tokens in ("<|end|>", "not a token", ["<|end|>", "a"])],
    lambda t: [t.get_vocab(), t.get_chat_template(), len(t)],
    lambda t: [t.apply_chat_template(talk) for talk in TALKS],
    lambda t: [t.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) for talk in TALKS],
    lambda t: [t.apply_chat_template(talk, tokenize=False, return_tensors="pt") for talk in TALKS],
    lambda t: [t.apply_chat_template(TALK, return_tensors="pt", return_dict=more) for more in (True, False)],
    lambda t: t.apply_chat_template(
        TALK, continue_final_message=True, tokenizer_kwargs={"return_attention_mask": False}
    ),
    lambda t: [t(TEXTS, padding=pads, return_tensors="np") for pads in (True, "longest", "max_length")],
    lambda t: t(TEXTS, padding="max_length", max_length=20),
    lambda t: [t(TEXTS, padding=True, padding_side="left", pad_to_multiple_of=8), t(TEXTS, padding="max_length")],
    lambda t: [t(TEXTS, truncation=cuts, max_length=3) for cuts in (True, False, None, "longest_first")],
    lambda t: [t.encode(LONG, None, adds, max_length=most) for most in (2, 99) for adds in (True, False)],
    lambda t: [t("a", LONG), t(TEXTS, TEXTS), t([("a", "b"), ["c", "d"]]), t.encode("a", "b"), t.tokenize(LONG)],
    lambda t: t(TEXTS, **dict.fromkeys(FURTHER_COLUMNS, True)) | t("a", **dict.fromkeys(FURTHER_COLUMNS, True)),
    lambda t: [t.apply_chat_template(TALK, max_length=5, truncation=cuts) for cuts in (True, False)],
    lambda t: [t.convert_tokens_to_string(["Ġa", "b"]), t.vocab, t.get_added_vocab(), t.added_tokens_decoder.keys()],
    lambda t: t(TEXTS, padding=True, return_tensors="pt").to("cpu").data,
    lambda t: t.apply_chat_template(TALK, None, None, "{{ messages[0].role }}{{ eos_token }}", True, False, False),
]


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_methods_are_those_of_transformers(call: Callable[[Any], Any]) -> None:
    ours, theirs = map(call, embedded())
    assert plain(ours) == plain(theirs)


def test_attributes_are_those_of_transformers() -> None:
    ours, theirs = embedded()
    kinds = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    names = [f"{kind}_token{end}" for kind in kinds for end in ("", "_id")]
    names += ["all_special_tokens", "all_special_ids", "special_tokens_map", "extra_special_tokens"]
    names += ["vocab_size", "is_fast", "chat_template", "model_max_length", "padding_side", "truncation_side"]
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert len(ours) == len(theirs)
    assert ours("a").attention_mask == [1, 1] and not hasattr(ours("a"), "nothing")
    own = Tokenizer(byte_level_backend(), {"eos_token": "<|end|>"})
    assert own.pad_token is own.pad_token_id is None
    own.pad_token = own.eos_token
    assert (own.pad_token_id, own.eos_token_id) == (1, 1) and not hasattr(own, "nothing")
    with pytest.raises(ValueError, match="padding needs a pad token"):
        Tokenizer(byte_level_backend())("a", padding=True)
    own.chat_template = "{{ messages[0].content }}"
    assert own.apply_chat_template(TALK[1:], tokenize=False) == TALK[1]["content"]


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda t: t("a", "b", truncation=True, max_length=1), "a pair of texts cannot be truncated"),
    (lambda t: t("a", padding="most"), "padding='most' and truncation=False cannot be used"),
    (lambda t: t("a", truncation="only_second"), "truncation='only_second' cannot be used"),
    (lambda t: t("a", stride=3), "does not support stride=3"),
    (lambda t: t("a", retrun_tensors="pt"), "does not support retrun_tensors='pt'"),
    (lambda t: t("a", return_overflowing_tokens=True), "does not support return_overflowing_tokens=True"),
    (lambda t: t("a", return_tensors="tf"), "return_tensors is 'tf'; it can be None"),
    (lambda t: t(["a", LONG], return_tensors="np"), "None, or for texts of one length"),
    (lambda t: t(None), "text must be a str or a list of them, not NoneType"),
    (lambda t: t([["a"]]), "text must be a str or a list of them, not list"),
    (lambda t: t.encode("a", text_target="b"), "text_target='b'"),
    (lambda t: t.decode([5], clean_up_tokenization_spaces=True), "clean_up_tokenization_spaces=True"),
    (lambda t: t.decode([5], skip_specials=True), "skip_specials=True"),
    (lambda t: t.batch_decode([[5]], skip_specials=True), "skip_specials=True"),
    (
        lambda t: t.apply_chat_template(TALK, tokenize=False, sanitize_control_tokens=True),
        "sanitize_control_tokens=True",
    ),
    (lambda t: t.apply_chat_template(TALK, return_assistant_tokens_mask=True), "return_assistant_tokens_mask=True"),
    (lambda t: t.apply_chat_template(TALK, continue_final_message="content"), "must be True or False"),
    (lambda t: t.apply_chat_template(TALK, messages=TALK), "'messages' is the conversation"),
    (lambda t: t.apply_chat_template(TALK, chat_template=5), "chat_template is 5; it must be the text"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_not_supported_is_named(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call(embedded()[0])


def test_copies_and_pickles() -> None:
    """As other processes get them, with what was set since."""
    tokenizer = Tokenizer.from_path(embedded_model_path())
    tokenizer.pad_token = "<|end|>"
    messages = [{"role": "user", "content": "Hello"}]
    for other in (pickle.loads(pickle.dumps(tokenizer)), copy.copy(tokenizer), copy.deepcopy(tokenizer)):
        ids = other.encode("Once upon a time")
        assert ids == tokenizer.encode("Once upon a time") and other.decode(ids) == tokenizer.decode(ids)
        assert other.pad_token_id == tokenizer.pad_token_id and len(other) == len(tokenizer)
        assert other.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
        other.pad_token = None
        assert tokenizer.pad_token == "<|end|>"
