"""Fields of ``config.json`` that only models with experts, recurrent states or quantized weights have. No torch.

Which of them a model has cannot be listed: each family has its own names. So they are recognised by words, and a field
that no parser has read is refused if it has one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

EXPERTS, STATES, QUANTIZATION = "experts", "recurrent states or layers of several kinds", "quantized weights"

_PATTERNS = {
    EXPERTS: re.compile(r"expert|rout(er|ed|ing)|(?<![a-z])(?!moes)[a-z]{0,4}moe(?![rst][a-z])"),
    STATES: re.compile(
        r"mamba|rwkv|recurren|hybrid|delta_?net|gated_?delta|hyena|griffin|linear_?att|linear_(num|key|value|conv)_|"
        r"conv_?kernel|attn_(type_list|layer_period|layer_offset)|block_types?(?![a-z])|"
        r"(?<![a-z])(ssm|lru|[a-z]?_?state|conv\d?d?)(?![a-z])"
    ),
    QUANTIZATION: re.compile(
        r"quant|gguf|gptq|bitsandbytes|load_in_\d|compress(ion|ed)|group_?size|"
        r"(?<![a-z])(awq|bnb|[a-z]{0,6}_?n?bits?|(fp|int|nf|mxfp|nvfp)[468])(?![a-z\d])"
    ),
}
"""On names in lower case, with and without ``_`` before what was a capital within a word."""
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_KIND_FIELD = re.compile(r"(type|kind|pattern|block)s?$")
"""Fields with values that name kinds of layers: ``mlp_type``, ``layers_block_type``."""
_OTHER_PARTS = ("id2label", "label2id", "auto_map", "task_specific_params", "vision_config", "audio_config")
"""Objects that do not describe the decoder."""


@dataclass(frozen=True, slots=True)
class ForeignField:
    """A field that is set, and what it belongs to."""

    name: str
    """The path in the file: ``ffn_config.moe_num_experts``."""
    value: Any
    kind: str
    """EXPERTS, STATES or QUANTIZATION."""


def foreign_fields(content: Mapping[str, Any], read: Collection[str] = (), prefix: str = "") -> Iterator[ForeignField]:
    """Fields of a kind that are set: neither null, false, 0, 1, "none" nor empty. Objects are searched too.

    ``read``: names at the top that are known; ``prefix``: the path of ``content``.
    """
    for name, value in content.items():
        if name in read or name in _OTHER_PARTS:
            continue
        if _is_set(value) and (kind := _kind_of(name, value)):
            yield ForeignField(prefix + name, value, kind)
        else:
            for nested in value if isinstance(value, list) else [value]:
                if isinstance(nested, dict):
                    yield from foreign_fields(nested, prefix=f"{prefix}{name}.")


def _kind_of(name: str, value: Any) -> str | None:
    words = [_CAPITAL.sub("_", name).lower(), name.lower()]
    if _KIND_FIELD.search(words[0]):
        words += [each.lower() for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    return next((kind for kind, pattern in _PATTERNS.items() if any(map(pattern.search, words))), None)


def _is_set(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_set, value.values()))
    if isinstance(value, list):  # a 1 in it is a layer of a kind, or a number for a layer
        return any(_is_set(each) or (each == 1 and each is not True) for each in value)
    if isinstance(value, str):
        return value.lower() not in ("", "none")
    return value is True or (value is not False and value not in (None, 0, 1))
