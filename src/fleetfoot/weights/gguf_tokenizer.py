"""From the vocabulary of a GGUF file to the content of a ``tokenizer.json``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetfoot.weights.gguf import GGUFError, GGUFModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_GPT2 = ""
_PATTERNS: Mapping[str, tuple[str, bool]] = {
    "gpt-2": (_GPT2, False),
    "smollm": (_GPT2, False),
    "llama-bpe": (rf"{_CASES}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}", True),
    "qwen2": (rf"{_CASES}|{_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}", False),
    "gpt-4o": (
        rf"{_WORD}{_UPPER}*{_LOWER}+{_CASES}?|{_WORD}{_UPPER}+{_LOWER}*{_CASES}?|"
        rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
        True,
    ),
    "tekken": (
        rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}", True,
    ),
}  # fmt: skip
"""``tokenizer.ggml.pre`` -> the pattern that divides texts, and whether a whole piece of the vocabulary is one token
whatever the merges. Those of the models' own tokenizer.json; an empty pattern is GPT-2's."""
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "gpt-4o": "gpt-4o", "deepseek-r1-qwen": "qwen2"}


class _Vocabulary:
    """Fields of ``tokenizer.ggml``."""

    def __init__(self, model: GGUFModel) -> None:
        self._metadata, self._path = model.metadata, model.files[0]
        self.tokens = self.items("tokens", str)
        self.types = self.items("token_type", int, [_NORMAL] * len(self.tokens))
        self.scores = self.items("scores", float, [0.0] * len(self.tokens))
        for name, found in (("token_type", self.types), ("scores", self.scores)):
            if len(found) != len(self.tokens):
                raise self.error(name, f"expected one for each of {len(self.tokens)} tokens")

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def error(self, name: str, problem: str) -> GGUFError:
        return GGUFError(self._path, f"tokenizer.ggml.{name}", self.get(name), problem)

    def items(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        value = self.get(name, default)
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            raise self.error(name, f"expected a list of {kind.__name__}")
        return value

    def special(self, kind: str) -> str | None:
        """The token of ``bos_token_id`` and so on."""
        token = self.get(f"{kind}_token_id")
        if token is None or token == 0xFFFFFFFF:
            return None
        if type(token) is not int or not 0 <= token < len(self.tokens):
            raise self.error(f"{kind}_token_id", f"expected the number of one of {len(self.tokens)} tokens")
        return str(self.tokens[token])


def has_tokenizer(model: GGUFModel) -> bool:
    return "tokenizer.ggml.model" in model.metadata


def tokenizer_files(model: GGUFModel) -> dict[str, dict[str, Any]]:
    """The contents of ``tokenizer.json`` and ``tokenizer_config.json``. Raises GGUFError: a field is invalid, or the
    kind of tokenizer is not supported."""
    vocabulary = _Vocabulary(model)
    kind = vocabulary.get("model")
    if kind not in ("gpt2", "llama"):
        raise vocabulary.error("model", "supported: gpt2 and llama")
    content = _bytes_of_words(vocabulary) if kind == "gpt2" else _pieces(vocabulary)
    added = [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": of_type != _USER_DEFINED}
        for index, (token, of_type) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if of_type in (_CONTROL, _USER_DEFINED) or (of_type == _UNKNOWN and kind == "llama")
    ]  # fmt: skip
    special = {f"{name}_token": vocabulary.special(full) for name, full in _SPECIAL.items()}
    config: dict[str, Any] = {name: token for name, token in special.items() if token}
    templates = {
        name.removeprefix("tokenizer.chat_template.") if "." in name.removeprefix("tokenizer.") else "default": text
        for name, text in model.metadata.items()
        if name.startswith("tokenizer.chat_template") and isinstance(text, str)
    }
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **content}
    tokenizer["post_processor"] = _ends(vocabulary, kind)
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _bytes_of_words(vocabulary: _Vocabulary) -> dict[str, Any]:
    """BPE over the bytes of words (GPT-2)."""
    name = vocabulary.get("pre", "gpt-2")
    name = _SAME.get(name, name)
    if name not in _PATTERNS:
        raise vocabulary.error("pre", f"supported: {', '.join((*_PATTERNS, *_SAME))}")
    pattern, ignores_merges = _PATTERNS[name]
    merges = [merge.split(" ") for merge in vocabulary.items("merges", str, [])]
    if any(len(merge) != 2 for merge in merges):
        raise vocabulary.error("merges", "expected two pieces with a space between them in each")
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not pattern}
    first: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if name == "smollm" else []
    if pattern:
        first = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first, bytes_of]},
        "decoder": {**bytes_of, "use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=ignores_merges),
    }


def _pieces(vocabulary: _Vocabulary) -> dict[str, Any]:
    """BPE over pieces of text with scores (SentencePiece): two pieces are merged in the order of the score of what they
    make."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    scored: list[tuple[float, int, int, list[str]]] = []
    for token, of_type, score in zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True):
        if of_type not in (_NORMAL, _USER_DEFINED):
            continue
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in ids and right in ids:
                scored.append((-score, ids[left], ids[right], [left, right]))
    scored.sort(key=lambda merge: merge[:3])
    has_prefix = vocabulary.get("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    prefix = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
    return {
        "normalizer": prefix if has_prefix else spaces,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary, [merge for *_, merge in scored], byte_fallback=True, fuse_unk=True,
            unk_token=vocabulary.special("unknown") or vocabulary.tokens[0],
        ),
    }  # fmt: skip


def _bpe(vocabulary: _Vocabulary, merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    return {"type": "BPE", "vocab": vocab, "merges": merges, **settings}


def _ends(vocabulary: _Vocabulary, kind: str) -> dict[str, Any] | None:
    """What is added before and after a text."""
    adds_bos = kind == "llama" or _SAME.get(vocabulary.get("pre"), vocabulary.get("pre")) == "llama-bpe"
    adds = {"bos": vocabulary.get("add_bos_token", adds_bos), "eos": vocabulary.get("add_eos_token", False)}
    tokens = {name: vocabulary.special(name) if wanted else None for name, wanted in adds.items()}
    if not any(tokens.values()):
        return None

    def around(*sequences: dict[str, Any]) -> list[dict[str, Any]]:
        ends = {
            name: [{"SpecialToken": {"id": token, "type_id": 0}}] if token else [] for name, token in tokens.items()
        }
        return [*ends["bos"], *sequences, *ends["eos"]]

    one, two = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    special = {
        token: {"id": token, "ids": [vocabulary.get(f"{name}_token_id")], "tokens": [token]}
        for name, token in tokens.items()
        if token
    }
    return {"type": "TemplateProcessing", "single": around(one), "pair": [*around(one), *around(two)],
            "special_tokens": special}  # fmt: skip


def end_tokens(model: GGUFModel) -> list[int]:
    """``eos_token_id``, and those that end a turn or a message."""
    found = (model.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in found if type(token) is int and 0 <= token < 1 << 31))
