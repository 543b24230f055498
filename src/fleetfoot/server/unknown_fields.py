"""Fields of other servers' APIs in a body: which change nothing here, and what to send in place of others."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from fleetfoot.utils.validation import is_one_of

logger = logging.getLogger(__name__)

ANY = object()
HARMLESS: Mapping[str, Any] = {
    "cache_prompt": ANY, "id_slot": ANY, "keep_alive": ANY, "slot_id": ANY, "use_cache": ANY,
    "best_of": 1, "chat_template_kwargs": {}, "details": False, "diversity_penalty": 0, "do_sample": True,
    "dynatemp_range": 0, "early_stopping": False, "extra_body": {}, "mirostat": 0, "n_probs": 0,
    "no_repeat_ngram_size": 0, "num_beams": 1, "num_return_sequences": 1, "presence_context_penalty": 0,
    "no_stop_trim": False, "repeat_penalty": 1, "return_full_text": False, "return_hidden_states": False,
    "separate_reasoning": True, "stream_reasoning": True, "tfs_z": 1, "timings_per_token": False, "top_a": 0,
    "typical_p": 1, "watermark": False, "xtc_probability": 0,
    "enable_thinking": None, "lora_request": None, "max_new_tokens": None, "n_predict": None, "num_ctx": None,
    "num_predict": None, "prompt_embeds": None, "rid": None, "thinking": None,
}  # fmt: skip
"""Unknown field -> the value besides null that changes nothing here, and that a body may have; ANY: all do not."""
HINTS = {
    "do_sample": "temperature 0 is greedy",
    "enable_thinking": "chat_template_kwargs takes it",
    "extra_body": "its fields stand in the body itself",
    "lora_request": "adapters are not supported",
    "max_new_tokens": "it is max_tokens",
    "n_predict": "it is max_tokens",
    "num_predict": "it is max_tokens",
    "num_ctx": "--max-model-len sets it",
    "num_return_sequences": "it is n",
    "prompt_embeds": "a prompt is a text or token ids",
    "repeat_penalty": "it is repetition_penalty",
    "rid": "it is request_id",
    "thinking": "chat_template_kwargs takes it",
}
_SIMILARITY = 0.8
"""A misspelling is at least so near to a field; names that share a word are not."""
_MAX_LOGGED = 256
"""Names that are logged: they come from clients."""


class UnknownFields:
    """What is done with fields that a body's type does not have.

    Args:
        allow: whether they are ignored, each after one line in the log.
    """

    def __init__(self, *, allow: bool = False) -> None:
        self._allow = allow
        self._logged: set[str] = set()

    def takes(self, name: str, value: Any, *, is_top: bool) -> bool:
        """Whether a body may have the field, which is ignored then."""
        if is_top and name in HARMLESS and (HARMLESS[name] is ANY or is_one_of(value, (HARMLESS[name],))):
            return True
        if self._allow and name not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(name)
            logger.warning("a request has the unknown field %.100r, which is ignored; later ones are not logged", name)
        return self._allow


NO_UNKNOWN_FIELDS = UnknownFields()


def advice(name: str, kind: Any) -> str:
    """What to do about an unknown field of the body's type."""
    if hint := HINTS.get(name):
        return hint
    near = difflib.get_close_matches(name[:100].lower(), _fields(kind), n=1, cutoff=_SIMILARITY)
    return f"did you mean {near[0]}?" if near else "leave it out, or start the server with --allow-unknown-fields"


def _fields(kind: Any) -> list[str]:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return [field.encode_name for field in msgspec.structs.fields(kind)] if is_struct else []
