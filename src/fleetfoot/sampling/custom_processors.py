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
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fleetfoot.config.engine import EngineConfig

if TYPE_CHECKING:
    import torch

    from fleetfoot.records.sampling_params import SamplingParams

_State = TypeVar("_State")

RequestLogitsProcessor = Callable[..., "torch.Tensor"]
"""``(output_token_ids, logits [vocab_size])`` or ``(prompt_token_ids, output_token_ids, logits)`` -> logits."""


class MoveDirectionality(enum.Enum):
    """How a request moves within the batch."""

    UNIDIRECTIONAL = 0
    """From the first index to the second."""
    SWAP = 1
    """Both indices exchange their requests."""


AddedRequest = tuple[int, "SamplingParams", list[int] | None, list[int]]
"""A new request: its index, parameters, prompt, and the list of its output tokens, which grows."""
MovedRequest = tuple[int, int, MoveDirectionality]
RemovedRequest = int


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch differs from that of the step before. The changes happen in the order of the fields."""

    batch_size: int
    """Requests in the batch, after the changes."""
    removed: Sequence[RemovedRequest]
    """Indices of requests that are gone, and that no new request has."""
    added: Sequence[AddedRequest]
    """A request that was preempted is added again, with the output that it has."""
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of all requests of a batch. One instance on each worker.

    Args:
        vllm_config: the engine's settings.
        device: of the logits.
        is_pin_memory: whether copies to the device need pinned memory to be asynchronous.
    """

    @classmethod  # noqa: B027  (most processors have no parameters)
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters of a request that are not valid for this processor."""

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
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        """Index in the batch -> the callable, which takes logits alone."""
        self.errors: dict[int, Exception] = {}
        """Index in the batch -> what its callable raised in the last `apply`."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable of a new request; None: it has none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_callable)

    def _new_callable(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        try:
            function = self.new_req_logits_processor(params)
        except Exception as error:
            return partial(_raise, error)  # in `apply`, which reports it on this request
        return None if function is None else bind_tokens(function, prompt_token_ids or [], output_token_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.errors = {}
        for index, function in self.req_info.items():
            try:
                logits[index] = function(logits[index])
            except Exception as error:
                self.errors[index] = error
        return logits


def _raise(error: Exception, logits: torch.Tensor) -> torch.Tensor:
    raise error


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
    """``function`` with its arguments before the logits: the output; prompt and output if it has three parameters. A
    result that is not ``[vocab_size]`` raises ValueError."""
    tokens = (prompt_token_ids, output_token_ids) if num_parameters(function) == 3 else (output_token_ids,)
    return lambda logits: _checked(function(*tokens, logits), logits.shape)


def _checked(result: Any, shape: torch.Size) -> torch.Tensor:
    import torch

    if not isinstance(result, torch.Tensor) or result.shape != shape:
        got = f"logits {list(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
        raise ValueError(f"it returned {got}; it must return logits {list(shape)}")
    return result


def num_parameters(function: Any) -> int:
    """The number of a callable's positional parameters without a default; 2 if it has no signature."""
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


class EngineProcessor:
    """A `LogitsProcessor` of the engine, and new instances of it: after an error its state may be inconsistent.

    Raises ValueError: the class cannot be instantiated.
    """

    def __init__(self, kind: type[LogitsProcessor], config: EngineConfig, device: torch.device) -> None:
        self._make = partial(kind, config, device, device.type == "cuda")
        try:
            self.current = self._make()
            self.is_argmax_invariant = self.current.is_argmax_invariant()
        except Exception as error:
            raise ValueError(describe(kind, error)) from error

    def restart(self, requests: Sequence[AddedRequest], batch_size: int) -> None:
        """Replace the instance by a new one that has these requests."""
        self.current = self._new(requests, batch_size)

    def alone(self, request: AddedRequest) -> LogitsProcessor:
        """A new instance that has one request, at index 0."""
        return self._new([(0, *request[1:])], 1)

    def _new(self, requests: Sequence[AddedRequest], batch_size: int) -> LogitsProcessor:
        processor = self._make()
        processor.update_state(BatchUpdate(batch_size, (), requests, ()))
        return processor


class ProcessorBatch:
    """The requests of Model Runner V1 as its `LogitsProcessor`s see them: numbered from 0, without gaps. A request that
    does not sample in a step keeps its index, with logits of 0.

    After an error, each request is tried with an instance of its own. Those for which it raises are ended; the others
    continue with a new instance. If it raises for none of them, all are ended.
    """

    def __init__(self, processors: Sequence[EngineProcessor] = ()) -> None:
        self._processors = list(processors)
        self._slots: list[ProcessorRow | None] = []
        self._outputs: dict[int, list[int]] = {}  # by the id of the row
        self._errors: dict[int, str] = {}  # by the id of the row
        self._new: list[ProcessorRow] = []
        self._gone: list[ProcessorRow] = []
        self._rows: Sequence[ProcessorRow] = []
        """The rows of the requests that sample."""
        self._index: list[int] = []
        """The row of each request that samples, in their order."""

    def __bool__(self) -> bool:
        return bool(self._processors)

    @property
    def has_invariant(self) -> bool:
        """Whether a processor does not affect greedy requests."""
        return any(processor.is_argmax_invariant for processor in self._processors)

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
        self._rows, self._index = rows, [places[id(row)] for row in rows]
        for processor in self._processors:
            try:
                processor.current.update_state(update)
            except Exception as error:
                self._fail(processor, self._find_update_errors(processor), error)
        return self._step_errors()

    def apply(self, logits: torch.Tensor, *, argmax_invariant: bool) -> tuple[torch.Tensor, dict[int, str]]:
        """The logits ``[num_sampled, vocab_size]`` float32 after the processors of one kind, and errors."""
        chosen = [processor for processor in self._processors if processor.is_argmax_invariant == argmax_invariant]
        if not chosen:
            return logits, {}
        import torch

        index = torch.tensor(self._index, device=logits.device)
        batch = logits.new_zeros(len(self._slots), logits.shape[1]).index_copy_(0, index, logits)
        for number, processor in enumerate(chosen):
            try:
                batch = _checked(processor.current.apply(batch), batch.shape)
            except Exception as error:
                return self._apply_alone(logits, chosen, chosen[number], error), self._step_errors()
            if isinstance(processor.current, AdapterLogitsProcessor):
                for place, raised in processor.current.errors.items():
                    if place in self._index:
                        self._set_error(place, describe(processor.current, raised))
        return batch[index].to(torch.float32), self._step_errors()

    def _apply_alone(
        self, logits: torch.Tensor, chosen: Sequence[EngineProcessor], failed: EngineProcessor, cause: Exception
    ) -> torch.Tensor:
        """`apply` with instances of each request, after ``cause``, which ``failed`` has raised."""
        result = logits.clone()
        errors: dict[EngineProcessor, dict[int, Exception]] = {processor: {} for processor in chosen}
        requests = {request[0]: request for request in self._requests()}
        for place, index in enumerate(self._index):
            row = logits[place : place + 1].clone()  # [1, vocab_size]
            for processor in chosen if index in requests else ():
                try:
                    row = _checked(processor.alone(requests[index]).apply(row), row.shape)
                except Exception as error:
                    errors[processor][index] = error
                    break
            result[place] = row[0]
        for processor in chosen:
            self._fail(processor, errors[processor], cause)
        return result

    def _find_update_errors(self, processor: EngineProcessor) -> dict[int, Exception]:
        """What it raises for each request alone, in the step that adds the request or in the next one."""
        errors: dict[int, Exception] = {}
        for request in self._requests():
            try:
                processor.alone(request).update_state(None)
            except Exception as error:
                errors[request[0]] = error
        return errors

    def _fail(self, processor: EngineProcessor, errors: dict[int, Exception], cause: Exception) -> None:
        """End the requests with ``errors``, or all with ``cause`` if there are none; restart it with the others."""
        requests = self._requests()
        for index, error in (errors or {request[0]: cause for request in requests}).items():
            self._set_error(index, describe(processor.current, error))
        try:
            processor.restart(self._requests(), len(self._slots))
        except Exception as error:
            for index, *_ in self._requests():
                self._set_error(index, describe(processor.current, error))

    def _requests(self) -> list[AddedRequest]:
        """All requests of the batch that have no error."""
        return [
            (index, row.params, list(row.token_ids[: row.num_prompt_tokens]), self._outputs[id(row)])
            for index, row in enumerate(self._slots)
            if row is not None and id(row) not in self._errors
        ]

    def _set_error(self, index: int, message: str) -> None:
        self._errors.setdefault(id(self._slots[index]), message)

    def _step_errors(self) -> dict[int, str]:
        """By the index of the row that samples."""
        errors = ((place, self._errors.get(id(row))) for place, row in enumerate(self._rows))
        return {place: error for place, error in errors if error is not None}

    def _update(self) -> BatchUpdate:
        """Number new requests: indices of removed ones first, then after the last; the last ones fill what is left."""
        gone = {id(row) for row in self._gone}
        holes = [index for index, row in enumerate(self._slots) if id(row) in gone]
        added, moved = [], []
        for index in holes:
            self._outputs.pop(id(self._slots[index]))
            self._errors.pop(id(self._slots[index]), None)
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
