"""The door: a prompt and its parameters are checked and tokenized here, or refused, before anything is queued."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import countOf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fleetfoot.records.prompts import PromptType
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams, bad_words_token_ids, is_boolean
from fleetfoot.sampling.seeds import request_seed

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

COPY_MARK = "\x1f"
"""Stands in the ids of a request's copies (n above 1) and in no id of a user's, so that none can be both."""
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class CheckedParams:
    """Parameters in which nothing is wrong, out of their caller's hands. Any number of requests can share them."""

    params: SamplingParams
    bad_words_token_ids: list[list[int]]
    kv_transfer_params: dict[str, Any] | None


@dataclass(slots=True)
class CheckedRequest:
    """A request in which nothing is wrong by itself; what it is among others is decided when it is admitted."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    packed_prompt: bytes
    """The same as int32."""
    params: CheckedParams
    max_tokens: int
    priority: int
    cache_salt: str | None
    arrival_time: float
    """Wall clock, seconds since the epoch."""


class _TokenIds(NamedTuple):
    """The tokens of a prompt."""

    as_list: list[int]
    """Plain ints, in a list that is nobody else's."""
    as_array: np.ndarray
    """The same, ``[num_tokens]`` int64."""


@dataclass(slots=True)
class AdmittedRequest:
    """A request that may be queued: one sequence for each of its ``n`` outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[Request]
    arrival_time: float
    """Wall clock, seconds since the epoch."""


class Admission:
    """Validates and tokenizes.

    Args:
        vocab_size: the model's; token ids must be below it.
        max_model_len: most tokens of prompt and output together.
        eos_token_ids: the model's end tokens.
        tokenizer: None when the engine runs on token ids alone.
        seed: of the engine; sequences without a seed of their own draw from it.
        sampling_defaults: what takes the place of defaults of `SamplingParams` where a user gives no parameters.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        max_logprobs: int,
        seed: int,
        sampling_defaults: Mapping[str, Any] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        # a checkpoint may name end tokens that its own vocabulary does not reach: they can never come up
        self.eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self.tokenizer = tokenizer
        self.max_logprobs = max_logprobs
        self.sampling_defaults = dict(sampling_defaults or {})
        self._seed = seed
        self._wall_clock = wall_clock
        self._num_admitted = 0

    def admit(
        self, request_id: str, prompt: PromptType, params: SamplingParams | CheckedParams, *, priority: int = 0
    ) -> AdmittedRequest:
        """`check` and `enter` in one.

        Raises:
            ValueError, TypeError: as of `check`.
        """
        return self.enter(self.check(request_id, prompt, params, priority=priority))

    def check(
        self, request_id: str, prompt: PromptType, params: SamplingParams | CheckedParams, *, priority: int = 0
    ) -> CheckedRequest:
        """Check everything about a request, and tokenize it. Changes nothing: it may run in any thread.

        Raises:
            ValueError, TypeError: the message names the field, its value and what would work.
        """
        arrival_time = self._wall_clock()
        checked = params if isinstance(params, CheckedParams) else self.check_params(params)
        params = checked.params
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise TypeError(f"priority is {priority!r}; it must be an int, lower is sooner")
        text, (token_ids, ids), cache_salt = self._read_prompt(prompt)
        if params.truncate_prompt_tokens is not None:
            keep = self.max_model_len - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            token_ids, ids = token_ids[-keep:], ids[-keep:]
        self._check_tokens(ids)
        room = self.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but a prompt of {len(token_ids)} tokens leaves room for "
                f"{max_tokens} (max_model_len {self.max_model_len}, max_tokens {params.max_tokens})"
            )
        return CheckedRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            packed_prompt=ids.astype(np.int32).tobytes(),
            params=checked,
            max_tokens=max_tokens,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival_time,
        )

    def check_params(self, params: SamplingParams) -> CheckedParams:
        """Check parameters, for one request or for many that share them. Changes nothing.

        Raises:
            ValueError, TypeError: the message names the field, its value and what would work.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is {params!r}; it must be a SamplingParams")
        params = params.clone()  # checked once more, as fields may have been assigned, and out of the caller's hands
        params.validate_for_model(
            vocab_size=self.vocab_size, max_logprobs=self.max_logprobs, has_tokenizer=self.tokenizer is not None
        )
        params.top_k = min(params.top_k, self.vocab_size)  # which is all of them, and a number that devices can hold
        return CheckedParams(params, self._bad_words(params), _kv_transfer_params(params))

    def enter(self, checked: CheckedRequest) -> AdmittedRequest:
        """Make the sequences of a request. Their seeds depend on how many requests have come in before."""
        params = checked.params.params
        seed = None if params.seed == -1 else params.seed
        number = self._num_admitted
        self._num_admitted += 1
        sequences = [
            Request(
                checked.request_id if params.n == 1 else f"{checked.request_id}{COPY_MARK}{index}",
                checked.prompt_token_ids,
                params,
                max_tokens=checked.max_tokens,
                seed=request_seed(seed, index, self._seed, number),
                eos_token_ids=self.eos_token_ids,
                bad_words_token_ids=checked.params.bad_words_token_ids,
                priority=checked.priority,
                cache_salt=checked.cache_salt,
                kv_transfer_params=checked.params.kv_transfer_params,
                packed_prompt=checked.packed_prompt,
            )
            for index in range(params.n)
        ]
        return AdmittedRequest(
            checked.request_id, checked.prompt, checked.prompt_token_ids, params, sequences, checked.arrival_time
        )

    def _read_prompt(self, prompt: PromptType) -> tuple[str | None, _TokenIds, str | None]:
        """Text (if known), token ids and cache salt of any form of prompt."""
        if isinstance(prompt, str):
            return prompt, self._tokenize(prompt), None
        if isinstance(prompt, dict):
            for key in prompt:
                if key not in PROMPT_KEYS:
                    raise ValueError(f"a prompt has no field {key!r}; it can have {', '.join(PROMPT_KEYS)}")
            text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise ValueError(f"cache_salt is {salt!r}; it must be a string that is not empty")
            if text is not None and not isinstance(text, str):
                raise TypeError(f"prompt is {text!r}; it must be a string")
            if token_ids is not None:
                return text, self._as_token_ids(token_ids), salt
            if text is None:
                raise ValueError("a prompt dictionary needs 'prompt' (text) or 'prompt_token_ids' (a list of ints)")
            return text, self._tokenize(text), salt
        return None, self._as_token_ids(prompt), None

    def _tokenize(self, text: str) -> _TokenIds:
        if self.tokenizer is None:
            raise ValueError(
                "this engine has no tokenizer (skip_tokenizer_init=True), so a prompt must be given as "
                "{'prompt_token_ids': [...]}"
            )
        if not text:
            raise ValueError("prompt is an empty string; it must hold at least one character")
        token_ids = self.tokenizer.encode(text)
        return _TokenIds(token_ids, np.array(token_ids, np.int64))

    @staticmethod
    def _as_token_ids(token_ids: object) -> _TokenIds:
        if isinstance(token_ids, (str, bytes, Mapping)) or not hasattr(token_ids, "__iter__"):
            raise TypeError(f"prompt_token_ids is {token_ids!r}; it must be a list of ints")
        entries: Any = token_ids if hasattr(token_ids, "__getitem__") else list(token_ids)
        try:
            ids = np.frombuffer(array("q", entries), np.int64)  # checks every entry, in C
        except (TypeError, OverflowError):
            for position, token in enumerate(entries):
                if is_boolean(token) or not isinstance(token, int) or not -(2**63) <= token < 2**63:
                    raise TypeError(f"prompt_token_ids[{position}] is {token!r}; token ids are ints") from None
            raise
        if type(entries) is list and countOf(map(type, entries), int) == len(entries):
            return _TokenIds(entries.copy(), ids)  # as most are: no new objects for all those ints
        # 0 and 1 are what booleans would have become: a mask in the place of token ids.
        for position in np.flatnonzero(ids <= 1).tolist():
            if is_boolean(entries[position]):
                raise TypeError(f"prompt_token_ids[{position}] is {entries[position]!r}, a boolean; token ids are ints")
        return _TokenIds(ids.tolist(), ids)

    def _check_tokens(self, ids: np.ndarray) -> None:
        if not len(ids):
            raise ValueError("the prompt has no tokens; it must have at least one")
        if ids.view(np.uint64).max() >= self.vocab_size:  # without signs, negative ids are the largest of all
            position = int(ids.argmin() if ids.min() < 0 else ids.argmax())
            raise ValueError(
                f"prompt_token_ids[{position}] is {ids[position]}; the model's vocabulary has "
                f"{self.vocab_size} tokens, 0 to {self.vocab_size - 1}"
            )
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; with max_model_len={self.max_model_len} it can have at most "
                f"{self.max_model_len - 1}, so that there is room for one more"
            )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        if not params.bad_words:
            return []
        assert self.tokenizer is not None  # validate_for_model has refused bad words without one
        tokenizer = self.tokenizer
        return bad_words_token_ids(
            params.bad_words, lambda text: tokenizer.encode(text, add_special_tokens=False), self.vocab_size
        )


def _kv_transfer_params(params: SamplingParams) -> dict[str, Any] | None:
    """What the request says to the KV connector, which checks it when the request is queued."""
    given = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise TypeError(f"kv_transfer_params is {given!r}; it must be an object")
    if params.n > 1:
        raise ValueError(f"n is {params.n}, and kv_transfer_params speak of the KV of one sequence; n must be 1")
    return given
