"""Custom logits processors, on Model Runner V1. Names and signatures are vLLM's.

A `LogitsProcessor` class belongs to an engine (``LLM(logits_processors=[...])``) and sees whole batches. A callable in
``SamplingParams.logits_processors`` belongs to a request and sees its row of logits.
"""

from __future__ import annotations

import enum
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from fleetfoot.config.engine import EngineConfig

if TYPE_CHECKING:
    from fleetfoot.records.sampling_params import SamplingParams

_State = TypeVar("_State")

RequestLogitsProcessor = Callable[..., torch.Tensor]
"""``(output_token_ids, logits [vocab_size])`` or ``(prompt_token_ids, output_token_ids, logits)`` -> logits."""


class MoveDirectionality(enum.Enum):
    """How a request moves within the batch."""

    UNIDIRECTIONAL = 0
    """From the first index to the second."""
    SWAP = 1
    """Both indices exchange their requests."""


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch differs from that of the step before. The changes happen in the order of the fields."""

    batch_size: int
    """Requests in the batch, after the changes."""
    removed: Sequence[int]
    """Indices of requests that are gone, and that no new request has."""
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    """Of each new request its index, parameters, prompt, and the list of its output tokens, which grows."""
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Changes the logits of all requests of a batch. One instance on each worker.

    Args:
        vllm_config: the engine's settings.
        device: of the logits.
        is_pin_memory: whether copies to the device need pinned memory to be asynchronous.
    """

    @classmethod  # noqa: B027  (most processors have no parameters)
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request whose parameters are not valid for this processor."""

    @abstractmethod
    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits [batch_size, vocab_size]`` float32, which may be changed in place -> the same shape."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether greedy requests are not affected. Such processors run after the temperature, others before it."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called in each step before `apply`; None: the same requests at the same indices."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A batch's processor made of one callable for each request that has one (`new_req_logits_processor`)."""

    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._callables: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.errors: dict[int, Exception] = {}
        """Index in the batch -> what its callable raised in the last `apply`."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable of a new request; None: it has none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._callables, batch_update, self._new_callable)

    def _new_callable(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        function = self.new_req_logits_processor(params)
        return None if function is None else bind_tokens(function, prompt_token_ids or [], output_token_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.errors = {}
        for index, function in self._callables.items():
            try:
                logits[index] = function(logits[index])
            except Exception as error:
                self.errors[index] = error
        return logits


def process_dict_updates(
    req_entries: dict[int, _State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], _State | None],
) -> bool:
    """Keep the states of requests by their index in the batch. Returns whether any may have changed.

    Args:
        req_entries: index -> state; changed in place.
        new_state: the state of a new request, from its parameters, prompt and output tokens; None: it has none.
    """
    if batch_update is None:
        return False
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt_token_ids, output_token_ids in batch_update.added:
        _set(req_entries, index, new_state(params, prompt_token_ids, output_token_ids))
    for first, second, how in batch_update.moved:
        moving, replaced = (req_entries.pop(index, None) for index in (first, second))
        _set(req_entries, second, moving)
        if how is MoveDirectionality.SWAP:
            _set(req_entries, first, replaced)
    return bool(batch_update.removed or batch_update.added or batch_update.moved)


def _set(entries: dict[int, _State], index: int, state: _State | None) -> None:
    entries.pop(index, None)
    if state is not None:
        entries[index] = state


def bind_tokens(
    function: RequestLogitsProcessor, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``function`` with its arguments before the logits: the output; prompt and output if it has three parameters."""
    tokens = (prompt_token_ids, output_token_ids) if num_parameters(function) == 3 else (output_token_ids,)
    return lambda logits: function(*tokens, logits)


def num_parameters(function: Any) -> int:
    """Of a callable, positional ones without a default; 2 if it has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters)


class ProcessorRow(Protocol):
    """What `ProcessorBatch` reads of a request."""

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int


class ProcessorBatch:
    """The requests of Model Runner V1 as its `LogitsProcessor`s see them: numbered from 0, without gaps. A request that
    does not sample in a step keeps its index, with logits of 0."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors = list(processors)
        self._is_invariant = [processor.is_argmax_invariant() for processor in processors]
        self._slots: list[ProcessorRow | None] = []
        self._outputs: dict[int, list[int]] = {}  # by the id of the row
        self._new: list[ProcessorRow] = []
        self._gone: list[ProcessorRow] = []
        self._index: list[int] = []
        """Of the requests that sample, in their order."""

    def __bool__(self) -> bool:
        return bool(self._processors)

    @property
    def has_invariant(self) -> bool:
        """Whether a processor does not affect greedy requests."""
        return any(self._is_invariant)

    def add(self, row: ProcessorRow) -> None:
        """A new request."""
        if self._processors:
            self._new.append(row)

    def remove(self, row: ProcessorRow | None) -> None:
        """A request that has ended or is preempted."""
        if any(row is new for new in self._new):
            self._new = [new for new in self._new if new is not row]
        elif row is not None and self._processors:
            self._gone.append(row)

    def begin(self, rows: Sequence[ProcessorRow]) -> dict[int, str]:
        """Start a step in which ``rows`` sample. Returns errors, by the index in ``rows``."""
        if not self._processors:
            return {}
        update = self._update() if self._new or self._gone else None
        for row in rows:
            output = self._outputs[id(row)]
            output += row.token_ids[row.num_prompt_tokens + len(output) :]
        places = {id(row): index for index, row in enumerate(self._slots)}
        self._index = [places[id(row)] for row in rows]
        errors: dict[int, str] = {}
        for processor in self._processors:
            try:
                processor.update_state(update)
            except Exception as error:
                errors |= dict.fromkeys(range(len(rows)), describe(processor, error))
        return errors

    def apply(self, logits: torch.Tensor, *, argmax_invariant: bool) -> tuple[torch.Tensor, dict[int, str]]:
        """The logits ``[num_sampled, vocab_size]`` float32 after the processors of one kind, and errors."""
        errors: dict[int, str] = {}
        chosen = [p for p, kind in zip(self._processors, self._is_invariant, strict=True) if kind == argmax_invariant]
        if not chosen:
            return logits, errors
        index = torch.tensor(self._index, device=logits.device)
        batch = logits.new_zeros(len(self._slots), logits.shape[1]).index_copy_(0, index, logits)
        for processor in chosen:
            try:
                result = processor.apply(batch)
                if result.shape != batch.shape:
                    raise ValueError(f"it returned logits {list(result.shape)} for {list(batch.shape)}")
                batch = result
            except Exception as error:
                errors |= dict.fromkeys(range(len(self._index)), describe(processor, error))
            own = getattr(processor, "errors", {}) if isinstance(processor, AdapterLogitsProcessor) else {}
            for place, raised in own.items():
                if place in self._index:
                    errors[self._index.index(place)] = describe(processor, raised)
        return batch[index].to(torch.float32), errors

    def _update(self) -> BatchUpdate:
        """Number new requests: indices of removed ones first, then behind the last; the last ones fill what is left."""
        gone = {id(row) for row in self._gone}
        holes = [index for index, row in enumerate(self._slots) if id(row) in gone]
        added, moved = [], []
        for index in holes:
            self._outputs.pop(id(self._slots[index]))
            self._slots[index] = None
        for row in self._new:
            index = holes.pop(0) if holes else len(self._slots)
            self._slots[index : index + 1] = [row]
            prompt, output = list(row.token_ids[: row.num_prompt_tokens]), list(row.token_ids[row.num_prompt_tokens :])
            self._outputs[id(row)] = output
            added.append((index, row.params, prompt, output))
        removed = tuple(holes)  # an index that a new request has is not among them
        while None in self._slots:
            last = self._slots.pop()
            if last is not None:
                hole = self._slots.index(None)
                self._slots[hole] = last
                moved.append((len(self._slots), hole, MoveDirectionality.UNIDIRECTIONAL))
        self._new, self._gone = [], []
        return BatchUpdate(len(self._slots), removed, added, moved)


NO_PROCESSORS = ProcessorBatch()
"""An engine without `LogitsProcessor`s."""


def describe(processor: Any, error: Exception) -> str:
    """The message for a request that a processor's error ends."""
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    return f"the logits processor {name} raised {type(error).__name__}: {error}"
