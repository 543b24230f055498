"""Outputs of requests. Names, fields and import path follow vLLM's."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from fleetfoot.compat.paths import provide_names
from fleetfoot.records.step import PackedLogprobs, RowLogprobs

if TYPE_CHECKING:
    import torch


class _ComputedWhenRead(ABC):
    """A field that is computed when it is read first: most are never read, and a step has hundreds."""

    __slots__ = ()
    _computed: ClassVar[str]
    """The name of the field, with a slot that is not set."""

    @abstractmethod
    def _compute(self) -> Any:
        """The value."""

    def __getattr__(self, name: str) -> Any:  # of a slot that is not set
        if name != self._computed:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = self._compute()
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]


class _DecodedWhenRead(_ComputedWhenRead):
    """Has ``decoded_token``."""

    __slots__ = ("_decode", "_token_id")
    _computed = "decoded_token"
    _decode: Callable[[int], str]
    _token_id: int

    def _compute(self) -> str:
        return self._decode(self._token_id)


@dataclass(slots=True)
class Logprob(_DecodedWhenRead):
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most probable token of the vocabulary."""
    decoded_token: str | None = None


_NEW: Any = object.__new__


def logprob_dict(
    token_ids: Sequence[int], logprobs: Sequence[float], rank: int, decode: Callable[[int], str] | None = None
) -> dict[int, Logprob]:
    """The entry of one position: the sampled token first, then the most probable ones in order.

    Args:
        token_ids, logprobs: the sampled token, followed by the most probable ones, descending.
        rank: of the sampled token. If it is among the most probable ones, its index there is used, so that tied tokens
            have different ranks.
        decode: token id to text; None leaves `Logprob.decoded_token` empty.
    """
    entries: dict[int, Any] = {}
    for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        entry = entries[token_id] = _NEW(Logprob)  # not its __init__: there are hundreds in a step
        entry.logprob, entry.rank = logprob, place or rank
        if decode is None:
            entry.decoded_token = None
        else:
            entry._decode, entry._token_id = decode, token_id
    return entries


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps and counts of a request, in seconds of a monotonic clock; ``arrival_time`` is wall clock time."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_drafted_tokens: int = 0
    """Draft tokens verified, with speculative decoding."""
    num_accepted_tokens: int = 0
    """Draft tokens accepted."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token (TTFT); 0 before it."""
        return max(0.0, self.first_token_ts - self.queued_ts) if self.first_token_ts else 0.0

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between tokens after the first (TPOT); 0 with fewer than two."""
        if self.num_generation_tokens < 2:
            return 0.0
        return (self.last_token_ts - self.first_token_ts) / (self.num_generation_tokens - 1)


class SampledLogprobs:
    """The logprobs of a sequence's tokens, or of a prompt's. Dictionaries are made when an output with them is read."""

    __slots__ = ("_decode", "_entries")

    def __init__(self, decode: Callable[[int], str] | None = None) -> None:
        self._decode = decode
        self._entries: list[Any] = []  # packed until they are read, then dictionaries

    def __len__(self) -> int:
        return len(self._entries)

    def extend(self, rows: Sequence[PackedLogprobs | None]) -> None:
        self._entries += rows

    def read(self, begin: int, end: int) -> list[dict[int, Logprob]]:
        """Those of the tokens from ``begin`` to ``end``."""
        entries = self._entries
        for index in range(begin, end):
            if isinstance(packed := entries[index], bytes):
                entries[index] = logprob_dict(*RowLogprobs.unpack(packed), self._decode)
        return entries[begin:end]

    def each(self, begin: int, end: int) -> Iterator[Any]:
        """The same one after another, without keeping them."""
        for entry in itertools.islice(self._entries, begin, end):
            yield logprob_dict(*RowLogprobs.unpack(entry), self._decode) if isinstance(entry, bytes) else entry

    def num_bytes(self, begin: int, end: int) -> int:
        """About the bytes of those that have not been read."""
        return (end - begin) * len(self._entries[end - 1] or b"") if end > begin else 0


class _LogprobsWhenRead(_ComputedWhenRead):
    """Has ``logprobs``, or another field with entries of tokens."""

    __slots__ = ("_span",)
    _computed = "logprobs"
    _span: tuple[SampledLogprobs, int, int]

    def each_logprobs(self) -> Iterator[Any] | None:
        """The entries one after another, which are not kept: whoever reads a million once needs no room for them. None:
        they were not requested."""
        if (span := getattr(self, "_span", None)) is not None:
            return span[0].each(*span[1:])
        values = getattr(self, self._computed)
        return None if values is None else iter(values)

    def num_logprob_bytes(self) -> int:
        """About the bytes of entries that have not been read."""
        span = getattr(self, "_span", None)
        return 0 if span is None else span[0].num_bytes(*span[1:])

    def read_later(self, sampled: SampledLogprobs, begin: int, end: int) -> None:
        """Let the field be the entries of the tokens from ``begin`` to ``end``."""
        self._span = sampled, begin, end
        delattr(self, self._computed)

    def _compute(self) -> list[dict[int, Logprob]]:
        sampled, begin, end = self._span
        return sampled.read(begin, end)


@dataclass(slots=True)
class CompletionOutput(_LogprobsWhenRead):
    """One of a request's ``n`` sequences."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the sampled tokens' logprobs; None if they were not requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """The logprob of each token, and those of the most probable ones."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error``; None while it is unfinished."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; the message, if the reason is ``error``."""
    weight_version: int = 0
    """The version of the weights that sampled its last token; 0: those of the start."""
    weight_versions: list[int] | None = None
    """The version for each token, if weights were updated while the sequence was generated."""
    is_unfit: bool = False
    """Whether its own grammar is the error that has ended it."""

    def finished(self) -> bool:
        return self.finish_reason is not None


class _PromptLogprobsWhenRead(_LogprobsWhenRead):
    """Has ``prompt_logprobs``."""

    __slots__ = ()
    _computed = "prompt_logprobs"


@dataclass(slots=True)
class RequestOutput(_PromptLogprobsWhenRead):
    """The output of a request, partial or final."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Logprobs of each prompt token; None for the first."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
    """Prompt tokens with prefix cache hits."""
    kv_transfer_params: dict[str, Any] | None = None
    """Parameters from the KV connector about the finished request's KV, if any."""
    weight_version: int = 0
    """The newest one of ``outputs``."""


# --- pooling ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PoolingOutput:
    """The result of a prompt."""

    data: torch.Tensor
    """float32, on the host: ``[dimensions]`` or ``[num_labels]``; for tasks of tokens with ``num_tokens`` before."""


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A score of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """The output of a request for a vector or scores."""

    request_id: str
    outputs: Any
    """`PoolingOutput`, `EmbeddingOutput`, `ClassificationOutput` or `ScoringOutput`, by the call."""
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    """``stop``, ``abort`` or ``error``."""
    stop_reason: int | str | None = None
    """The message, if the reason is ``error``."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    weight_version: int = 0
    """The version of the weights that computed the last part of the prompt; 0: those of the start."""


EmbeddingRequestOutput = PoolingRequestOutput
ClassificationRequestOutput = PoolingRequestOutput
ScoringRequestOutput = PoolingRequestOutput


provide_names(__name__)
