"""A model runner: its interface, and what the runners share: the KV cache, the order of a step, and in a pipeline the
sampled tokens.

execute_model   the KV connector begins the step; prepare the inputs; forward
sample_tokens   logits; sample and verify drafts; propose drafts; the KV connector ends the step; the step's barrier
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.distributed.groups import PipelineGroup
from fleetfoot.kernels.runtime.compile_ahead import CompiledKernels
from fleetfoot.models.interface import CausalLM
from fleetfoot.records.forward_context import IntermediateTensors
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import (
    Agreement,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
    TokenMasks,
    WarmUpOutput,
)
from fleetfoot.runner.step_barrier import NoBarrier, StepBarrier
from fleetfoot.runner.step_connector import NoConnector, StepConnector
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftSettings
from fleetfoot.utils.memory import use_small_pages
from fleetfoot.utils.process import run_all
from fleetfoot.weights.loading import ModelLoader
from fleetfoot.weights.sleep import KV_CACHE, RESIDENT, WEIGHTS, SleepMemory
from fleetfoot.weights.store import WeightStore


class ModelRunner(ABC):
    """Turns a `SchedulerOutput` into tokens. Calls come in pairs: `execute_model`, then `sample_tokens`.

    ``loader`` builds the model, or a pipeline stage of it, when `load_model` is called. ``max_num_seqs``: requests in a
    step; ``max_model_len``: tokens of a request; ``draft_settings``: the number of drafts, and on the last rank of a
    pipeline the drafter; ``connector``: None: there is none; ``barrier``: None: it does nothing; ``memory``: of weights
    and KV.
    """

    name: ClassVar[str]
    """``v1`` or ``v2``."""
    fused_layers: tuple[int, ...]
    """Numbers of the decoder layers that run fused, set by `load_model`."""
    kv_layout = ""
    """Name of the KV cache's layout, set by `initialize_kv_cache`."""
    kernels = CompiledKernels()
    """What `warm_up` has compiled."""
    _token_sync: SampledTokenSync

    def __init__(
        self,
        loader: ModelLoader,
        *,
        max_num_seqs: int,
        max_model_len: int,
        draft_settings: DraftSettings = NO_DRAFTING,
        connector: StepConnector | None = None,
        barrier: StepBarrier | None = None,
        memory: SleepMemory = RESIDENT,
    ) -> None:
        self._loader = loader
        self.weights = WeightStore(loader.context.device)
        """The weights of this rank, a drafter's included."""
        self._memory = memory
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._draft_settings = draft_settings
        self._connector = connector or NoConnector()
        self.barrier = barrier or NoBarrier()
        self._pipeline = loader.context.groups.pipeline
        self._model: CausalLM | None = None
        self._kv_caches: list[torch.Tensor] = []
        self._execute_state: tuple[SchedulerOutput, Any] | None = None
        """The step between `execute_model` and `sample_tokens`, and the results of its forward pass."""
        self._ready_output: ModelRunnerOutput | None = None
        """The output of a step that was complete after `execute_model`."""
        self._step: SchedulerOutput | None = None
        """The step between `execute_model` and `sample_tokens`."""
        self.has_failed = False
        """Whether a step has raised, or its output has: this rank enters no collective any more."""

    # --- start ------------------------------------------------------------------------------------------------------

    def load_model(self) -> None:
        """Read the weights to the device."""
        with self._memory.allocating(WEIGHTS):
            self._model = self._load()
            if (drafter := self._draft_settings.drafter) is not None:
                drafter.load_model(self._model)
        self.fused_layers = self._model.model.layers.fused_layers
        self.weights.add(self._model)
        if drafter is not None:
            drafter.add_weights(self.weights)

    @property
    def model(self) -> CausalLM:
        """Raises RuntimeError: it is not loaded."""
        if self._model is None:
            raise RuntimeError("the model was read before load_model")
        return self._model

    def _load(self) -> CausalLM:
        return self._loader.load()

    def initialize_kv_cache(self, layout: KVLayout) -> None:
        """Allocate the KV cache and the runner's state."""
        model, drafter = self._model, self._draft_settings.drafter
        if model is None:
            raise RuntimeError("initialize_kv_cache was called before load_model")
        self.kv_layout = layout.name
        with self._memory.allocating(KV_CACHE):
            kv_caches = allocate_kv_cache(layout, self._loader.context.device)
        self._connector.clear_slabs = partial(clear_slabs, kv_caches[0])
        self._kv_spans = [(kv_cache.data_ptr(), kv_cache.nbytes) for kv_cache in kv_caches]
        views = layout.layer_views(kv_caches)
        self._kv_caches = views[: len(model.layers)]
        if drafter is not None:
            drafter.bind_kv_caches(views[len(model.layers) :])
        self._connector.register_kv_caches(kv_caches, layout)
        self._initialize_state(model, layout)

    @abstractmethod
    def _initialize_state(self, model: CausalLM, layout: KVLayout) -> None:
        """Allocate the rows of requests and all else that steps use, ``_token_sync`` included."""

    def warm_up(self) -> None:  # noqa: B027
        """Compile and capture what serving uses, without an effect on state or statistics. Raises
        `KernelCompileError`."""

    # --- sleep ------------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Give the memory of weights and KV back, while no step runs. Level 1 keeps the weights on the host; level 2
        drops what a checkpoint gives. KV is dropped. Raises as `SleepMemory.release`."""
        self.barrier.suspend()
        self._memory.release(WEIGHTS, self.weights.stored() if level == 2 else ())
        if level == 2:
            self.weights.mark_lost()
        self._memory.release(KV_CACHE, self._kv_spans, keeps_rest=False)

    def wake_up(self, tag: str) -> None:
        """Allocate the memory of a tag again; KV and dropped weights are 0. Raises as `SleepMemory.restore`."""
        self._memory.restore(tag)
        if tag == WEIGHTS:
            self.barrier.resume()

    # --- a step -----------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Queue the forward pass. `sample_tokens` is called next. Raises RuntimeError: an earlier step has raised."""
        if self._model is None or not self._kv_caches:
            raise RuntimeError("execute_model was called before load_model and initialize_kv_cache")
        if self.has_failed:
            raise RuntimeError("an earlier step has raised, and this rank takes no further ones")
        self._step, connector = scheduler_output, self._connector
        try:
            self.barrier.begin(scheduler_output)
            if scheduler_output.is_idle:
                self._free_rows(scheduler_output)
            if scheduler_output.is_idle and not scheduler_output.agreement.num_tokens:
                kv_output = connector.no_forward(scheduler_output)
            else:
                connector.pre_forward(scheduler_output)
                if scheduler_output.is_idle:
                    self._compute_padding(scheduler_output.agreement)
                else:
                    self._forward(scheduler_output)
                if self._execute_state is not None:
                    return
                # this rank does not sample: its last write of KV is queued
                kv_output = connector.post_forward(scheduler_output.finished_req_ids)
            self._ready_output = ModelRunnerOutput([], kv_connector_output=kv_output)
        except BaseException:
            self._abandon_step()
            raise

    def sample_tokens(self, masks: TokenMasks | None) -> PendingOutput:
        """Logits, sampling, verification of drafts, drafting, then the KV connector and the barrier, for the step that
        `execute_model` queued. On a rank that is not last in its pipeline, and after an idle step, the output has
        only that of the KV connector. ``masks``: the tokens that grammars allow; None: all."""
        if self._step is None:
            raise RuntimeError("sample_tokens was called without an execute_model before it")
        step, self._step = self._step, None
        output, self._ready_output = self._ready_output, None
        try:
            if output is None:
                output = self._sample(masks)
                output.kv_connector_output = self._connector.post_forward(step.finished_req_ids)
            self.barrier.step(step)
            output.balance = self.barrier.take_report()
        except BaseException:
            self._abandon_step()
            raise
        return output

    def _compute_padding(self, agreement: Agreement) -> None:
        """See `SchedulerOutput.agreement`."""
        output = self._forward_padding(agreement)
        if isinstance(output, IntermediateTensors):
            self._pipeline.send(output)

    def _run_warm_up_step(self, step: WarmUpOutput) -> None:
        """A step of no request, which the KV connector never gets."""
        self.barrier.begin(step)
        self._forward(step)
        if self._execute_state is not None:
            self._sample(None).get()
        self.barrier.step(step)

    def _abandon_step(self) -> None:
        self.has_failed, self._step = True, None
        self.barrier.abandon()
        self._connector.abandon()

    @abstractmethod
    def _free_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Free the rows of requests that have ended or are preempted."""

    @abstractmethod
    def _forward(self, scheduler_output: SchedulerOutput) -> None:
        """See `execute_model`. On a rank that samples it sets ``_execute_state``."""

    @abstractmethod
    def _forward_padding(self, agreement: Agreement) -> torch.Tensor | IntermediateTensors:
        """The output of this rank's layers for tokens of no request, with what the previous rank has sent of them."""

    @abstractmethod
    def _sample(self, masks: TokenMasks | None) -> Any:
        """The output of the step of ``_execute_state``, which it clears."""

    def _send_to_next_stage(
        self, hidden_states: IntermediateTensors, scheduler_output: SchedulerOutput, rows: Any
    ) -> None:
        """End a step on a rank that is not the last of its pipeline; ``rows`` are those of all requests that sample."""
        self._token_sync.expect(scheduler_output, rows)
        self._pipeline.send(hidden_states)

    def shutdown(self) -> None:
        """Free the memory; the runner cannot be used afterwards."""
        self._model = self._execute_state = self._ready_output = self._step = None
        self._kv_caches = []
        run_all(self._connector.shutdown, self._memory.close)


class SampledTokenSync:
    """Sends what a step has sampled as a message ``[n, 2 + k]`` int32: the newest token, the number of rejected query
    tokens (-1 for a request without a new token), and k drafts for the next step.

    An earlier rank counts each query as accepted, and corrects its rows when it receives the message, which is before
    it prepares a step of one of these rows.

    ``apply`` corrects rows. Its arguments are the rows, their message, and the number of query tokens of each decode.
    """

    def __init__(
        self,
        pipeline: PipelineGroup,
        num_drafts: int,
        device: torch.device,
        apply: Callable[[Any, torch.Tensor, int], None],
    ) -> None:
        self._send = pipeline.send_sampled_tokens
        self._receive = pipeline.receive_sampled_tokens
        self._width = 2 + num_drafts
        self._device = device
        self._apply = apply
        self._pending: deque[tuple[int, Any, int]] = deque()
        """Step, rows and query length of messages that have not been received."""

    def send(self, message: torch.Tensor | None) -> None:
        """Send the message of a step; None: it has none."""
        if message is not None:
            self._send(message)

    def expect(self, scheduler_output: SchedulerOutput, rows: Any) -> None:
        """Register a step that sends a message if a request samples. ``rows``: ``[n]``: of the requests that sample;
        not changed until the message is received."""
        if scheduler_output.num_sampled:
            self._pending.append((scheduler_output.step, rows, 1 + scheduler_output.num_drafts))

    def apply_nothing(self) -> None:
        """Apply a message of a step in which no request has sampled; of a dry pass."""
        rows = torch.empty(1, dtype=torch.int32, device=self._device)
        self._apply(rows, torch.empty((1, self._width), dtype=torch.int32, device=self._device), 1)

    def receive(self, last_step: int) -> None:
        """Receive and apply the messages of all steps up to ``last_step``."""
        while self._pending and self._pending[0][0] <= last_step:
            _, rows, query_len = self._pending.popleft()
            message = torch.empty((len(rows), self._width), dtype=torch.int32, device=self._device)
            self._receive(message)
            self._apply(rows, message, query_len)


def clear_slabs(arena: torch.Tensor, slabs: Sequence[int]) -> None:
    """Zero some slabs of ``arena [num_slabs, elements]``, consecutive ones at once."""
    ordered = sorted(slabs)
    begin = 0
    for index, slab in enumerate(ordered, start=1):
        if index == len(ordered) or ordered[index] != slab + 1:
            arena[ordered[begin] : slab + 1].zero_()
            begin = index


def allocate_kv_cache(layout: KVLayout, device: torch.device) -> list[torch.Tensor]:
    """The tensors of the cache (`KVLayout.tensor_shapes`), zeroed, because masking does not remove a NaN in a slot that
    was never written.

    On a CPU, pages of zeros take memory only when blocks are first written.
    """
    dtype = getattr(torch, layout.dtype)
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in layout.tensor_shapes]
    tensors = []
    for shape in layout.tensor_shapes:
        memory = np.zeros(math.prod(shape) * DTYPE_BYTES[layout.dtype], dtype=np.uint8)
        use_small_pages(memory.ctypes.data, memory.nbytes)
        tensors.append(torch.from_numpy(memory).view(dtype).view(shape))
    return tensors
