"""Encoded texts as columns, cut and padded as transformers does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

_COLUMNS = {
    "input_ids": "ids",
    "token_type_ids": "type_ids",
    "attention_mask": "attention_mask",
    "special_tokens_mask": "special_tokens_mask",
    "offset_mapping": "offsets",
}
"""Column -> attribute of an `Encoding`."""
PADDING = {True: "longest", False: "do_not_pad", None: "do_not_pad"}
TRUNCATION = {True: "longest_first", False: "do_not_truncate", "only_first": "longest_first"}
"""Other values of the arguments, and what they mean."""
MOST_TOKENS = int(1e30)
"""``model_max_length`` of a tokenizer without one."""


class BatchEncoding(dict[str, Any]):
    """Columns (``input_ids``, ...) of one text or several, by name and as attributes."""

    data = property(dict)

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"there is no column {name!r}; there are {', '.join(self)}")
        return self[name]

    def to(self, *device: Any, **options: Any) -> BatchEncoding:
        """Move the tensors; returns this object."""
        self.update({name: value.to(*device, **options) for name, value in self.items() if hasattr(value, "to")})
        return self


def pad(rows: Sequence[tokenizers.Encoding], length: int, side: str, token: str | None, token_id: int | None) -> None:
    """Pad each row to at least ``length`` tokens. Raises ValueError: there is no token for it."""
    if token is None or token_id is None:
        raise ValueError("padding needs a pad token, and there is none; set it: tokenizer.pad_token = ...eos_token")
    for row in rows:
        row.pad(length, direction=side, pad_id=token_id, pad_token=token)


def as_columns(
    rows: Sequence[tokenizers.Encoding],
    names: Mapping[str, bool],
    kind: str | None,
    tensor_types: Mapping[str, Callable[[Any], Any]],
    *,
    is_batch: bool,
) -> BatchEncoding:
    """The columns that ``names`` has with True. ``kind``: of tensors, a key of ``tensor_types``, or None for lists;
    ``is_batch``: whether a column has a list for each row, which tensors always have."""
    columns: dict[str, Any] = {
        name: [getattr(row, attribute) for row in rows] for name, attribute in _COLUMNS.items() if names.get(name)
    }
    if names.get("length"):
        columns["length"] = list(map(len, rows))
    if kind is not None:
        if kind not in tensor_types or len(set(map(len, rows))) > 1:
            kinds = ", ".join(map(repr, tensor_types))
            raise ValueError(
                f"return_tensors is {kind!r}; it can be None, or for texts of one length in tokens (padding=True makes "
                f"them so) {kinds}"
            )
        return BatchEncoding({name: tensor_types[kind](values) for name, values in columns.items()})
    if not is_batch:
        columns = {name: values if name == "length" else values[0] for name, values in columns.items()}
    return BatchEncoding(columns)
