"""Both sides of a connector around an object of a class that is written for vLLM.

Per-layer methods are called before and after the forward pass, for all layers: fused layers and captured graphs run no
Python in between. KV is final then: the drafter has written its own.

A synchronous load, ``(n, False)``, takes place in the step that gives the request its blocks, and its forward pass
begins in the next one. So a load that fails is found before anything has read it. `records.SchedulerOutput` shows the
step in which it is loaded as the request's first.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import DEFAULT_KV_TRANSFER_TIMEOUT, KVTransferConfig
from fleetfoot.kv_transfer.base.connector import KVConnector, SchedulerConnector, TransferContext, WorkerConnector
from fleetfoot.kv_transfer.vllm import records as vllm
from fleetfoot.kv_transfer.vllm.base import UNSUPPORTED_METHODS, KVConnectorBase_V1, KVConnectorRole
from fleetfoot.records.kv_layout import BLOCK_CONTIGUOUS_HND, TOKEN_MAJOR_NHD, KVLayout
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput, TransferFailure

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LAYOUTS = {
    "NHD": TOKEN_MAJOR_NHD,
    "HND": BLOCK_CONTIGUOUS_HND,
    **{name: name for name in (TOKEN_MAJOR_NHD, BLOCK_CONTIGUOUS_HND)},
}
"""vLLM's names of layouts, and Fleetfoot's."""
_IDLE_S = 0.001
"""How long a step without a forward pass waits for transfers."""


def adapted(kind: type) -> type:
    """A `KVConnector` of a class derived from `KVConnectorBase_V1`; other classes as they are."""
    if not issubclass(kind, KVConnectorBase_V1):
        return kind
    names = {"kind": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (VllmConnector,), names)


class VllmConnector(KVConnector):
    """Makes both sides around objects of ``kind``."""

    kind: ClassVar[type[KVConnectorBase_V1]]

    @classmethod
    def required_kv_layouts(cls, config: KVTransferConfig, engine: EngineConfig) -> Any:
        """Names of the layouts that ``kind`` accepts, or what it declares as them. Raises ValueError: it requires one
        that does not exist."""
        owner = f"get_required_kvcache_layout of the KV connector {config.kv_connector}"
        try:
            required = cls.kind.get_required_kvcache_layout(vllm.VllmConfig.of_settings(config, engine))
        except Exception as error:
            raise ValueError(f"{owner} has raised {type(error).__name__}: {error}") from error
        if required is None:
            declared = getattr(cls.kind, "accepted_kv_layouts", ("NHD",))
            is_listed = isinstance(declared, Set | list | tuple)
            return frozenset(LAYOUTS.get(name, name) for name in declared) if is_listed else declared
        if not isinstance(required, str) or required not in LAYOUTS:
            raise ValueError(f"{owner} returns {required!r}; it can return {', '.join(LAYOUTS)} or None")
        return frozenset({LAYOUTS[required]})

    @classmethod
    def check_settings(cls, context: TransferContext) -> None:
        kind = cls.kind
        for name, reason in UNSUPPORTED_METHODS.items():
            if hasattr(kind, name):
                raise ValueError(f"the KV connector {kind.__name__} has {name}, which is not called here: {reason}")
        if inspect.isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise TypeError(f"the KV connector {kind.__name__} has no {missing}")
        if context.config.kv_transfer_timeout != DEFAULT_KV_TRANSFER_TIMEOUT:
            logger.warning("kv_transfer_config: kv_transfer_timeout has no meaning for %s", kind.__name__)
        kind.check_settings(vllm.VllmConfig.of_context(context))

    @classmethod
    def scheduler_side(cls, context: TransferContext) -> SchedulerConnector:
        layers = 0 if context.model is None else context.model.num_layers
        kv_cache = vllm.KVCacheConfig.of(context.num_blocks, context.block_size, vllm.layer_names(range(layers)))
        connector = _make(cls.kind, context, KVConnectorRole.SCHEDULER, kv_cache)
        return VllmScheduler(connector, context.block_size)

    @classmethod
    def worker_side(cls, context: TransferContext) -> WorkerConnector:
        return VllmWorker(cls.kind, context)


def _make(
    kind: type[KVConnectorBase_V1], context: TransferContext, role: KVConnectorRole, kv_cache: vllm.KVCacheConfig
) -> KVConnectorBase_V1:
    """An object; constructors of earlier versions have no ``kv_cache_config``."""
    parameters = inspect.signature(kind).parameters.values()
    takes_it = any(item.name == "kv_cache_config" or item.kind is item.VAR_KEYWORD for item in parameters)
    return kind(vllm.VllmConfig.of_context(context), role, *([kv_cache] if takes_it else []))


@dataclass(slots=True)
class Load:
    """A load that begins in a step."""

    block_ids: list[int]
    is_async: bool


@dataclass(slots=True)
class StepMetadata:
    """The metadata of a step for the workers."""

    content: Any
    """The connector's own."""
    loads: dict[str, Load]
    queries: list[tuple[int, int, list[int]]]
    """As in `records.AttentionMetadata`."""


# --- the scheduler side ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tracked:
    """A request that has not ended."""

    request: Request
    view: vllm.Request
    shown_block_ids: list[int] | None = None
    """Its blocks when a step of the connector showed it last; None: it is new, or has lost them."""
    was_shown: bool = False
    num_matched: int = 0
    """The connector's own number of tokens that it can load."""
    is_async: bool = False


@dataclass(slots=True)
class VllmScheduler(SchedulerConnector):
    """Calls the methods of the scheduler side."""

    connector: KVConnectorBase_V1
    block_size: int
    _requests: dict[str, _Tracked] = field(default_factory=dict)
    _rows: dict[int, _Tracked] = field(default_factory=dict)
    _undecided: set[str] = field(default_factory=set)
    """Requests for which the connector has not determined yet how many tokens it has."""
    _new_loads: dict[str, Load] = field(default_factory=dict)
    """Since the last step."""
    _loading_now: list[_Tracked] = field(default_factory=list)
    """The requests with synchronous loads among these; they may have ended meanwhile."""
    _loads: dict[str, Load] = field(default_factory=dict)
    """Loads that have not ended."""
    _held: set[str] = field(default_factory=set)
    _loads_nothing: bool = False

    def check_request(self, request: Request) -> None:
        tracked = _Tracked(request, vllm.Request(request))
        self.connector.on_new_request(tracked.view)
        self._requests[request.request_id] = tracked

    def _track(self, request: Request) -> _Tracked:
        """After a restart of the workers, requests of before may be unknown."""
        return self._requests.setdefault(request.request_id, _Tracked(request, vllm.Request(request)))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        if self._loads_nothing:
            return 0
        tracked = self._track(request)
        count, tracked.is_async = self.connector.get_num_new_matched_tokens(tracked.view, num_computed_tokens)
        if count is None:
            self._undecided.add(request.request_id)
            return None
        self._undecided.discard(request.request_id)
        tracked.num_matched = count
        # whole blocks, without the last token: it may count a part of a block, and all tokens of a prompt
        last = min(num_computed_tokens + count, request.num_tokens - 1) // self.block_size
        return max(0, last * self.block_size - num_computed_tokens)

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        tracked, size = self._track(request), self.block_size
        first, count = num_computed_tokens // size, num_external_tokens // size
        end = num_computed_tokens + tracked.num_matched
        # as in vLLM: an asynchronous load gets the other blocks in a second call, when it has ended
        block_ids = request.block_ids[: -(-end // size)] if tracked.is_async else list(request.block_ids)
        self.connector.update_state_after_alloc(tracked.view, vllm.KVCacheBlocks(block_ids, first), tracked.num_matched)
        load = Load(request.block_ids[first : first + count], tracked.is_async)
        self._new_loads[request.request_id] = self._loads[request.request_id] = load
        if not load.is_async:
            self._loading_now.append(tracked)

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        """The connector sees this in `records.SchedulerOutput`."""

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        tracked = self._track(request)
        del self._requests[request.request_id]
        self._undecided.discard(request.request_id)
        is_held, params = self.connector.request_finished(tracked.view, list(request.block_ids))
        if is_held:
            self._held.add(request.request_id)
        return is_held, params

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        shown = self._show(scheduler_output)
        content = self.connector.build_connector_meta(shown)
        for event in self.connector.take_events():
            logger.debug("KV connector %s: %s", type(self.connector).__name__, event)
        loads, self._new_loads = self._new_loads, {}
        queries = [self._query(tracked, count) for _, tracked, count in self._scheduled(scheduler_output)]
        return StepMetadata(content, loads, queries)

    def _scheduled(self, output: SchedulerOutput) -> list[tuple[int, _Tracked, int]]:
        """The rows of a step in batch order, each with its request and the number of its tokens."""
        rows = zip(output.rows, output.num_scheduled_tokens, strict=True)
        return [(row, self._rows[row], count) for row, count in rows if row in self._rows]

    def _query(self, tracked: _Tracked, count: int) -> tuple[int, int, list[int]]:
        request, size = tracked.request, self.block_size
        start = request.num_computed - count  # the scheduler has counted this step already
        return start, count, request.block_ids[start // size : -(-(start + count) // size)]

    def _show(self, output: SchedulerOutput) -> vllm.SchedulerOutput:
        """The step with vLLM's names, after the requests that get blocks were reported to the connector."""
        shown = vllm.SchedulerOutput(
            total_num_scheduled_tokens=output.total_num_scheduled_tokens, finished_req_ids=set(output.finished_req_ids)
        )
        for request_id, row in output.finished:
            freed = self._rows.pop(row, None)
            if freed is not None and self._requests.get(request_id) is freed:  # it has not ended
                freed.shown_block_ids = None
                shown.preempted_req_ids.add(request_id)
        for tracked in self._loading_now:
            request = tracked.request
            self._show_first(shown, tracked, request.num_computed + request.num_loaded)
            shown.num_scheduled_tokens[request.request_id] = 0
        self._loading_now = []
        started = set()
        for new in output.new_requests:
            if (starting := self._requests.get(new.request_id)) is None:
                continue
            self._rows[new.row] = starting
            if starting.shown_block_ids != new.block_ids:
                started.add(new.row)
                blocks = vllm.KVCacheBlocks(list(new.block_ids), new.num_computed_tokens // self.block_size)
                self.connector.update_state_after_alloc(starting.view, blocks, 0)
                self._show_first(shown, starting, new.num_computed_tokens)
        appended = {row: block_ids for row, _, block_ids in output.new_block_ids}
        for row, running, count in self._scheduled(output):
            request_id = running.request.request_id
            shown.num_scheduled_tokens[request_id] = count
            if row not in started:
                num_computed = running.request.num_computed - count
                shown.scheduled_cached_reqs.add(running.view, num_computed, appended.get(row), is_resumed=False)
            if output.num_drafts and len(shown.scheduled_spec_decode_tokens) < output.num_decodes:
                shown.scheduled_spec_decode_tokens[request_id] = [-1] * output.num_drafts
        return shown

    def _show_first(self, shown: vllm.SchedulerOutput, tracked: _Tracked, num_computed: int) -> None:
        """Show a request that has got all of its blocks: new, or resumed."""
        request, view = tracked.request, tracked.view
        tracked.shown_block_ids = block_ids = list(request.block_ids)
        if tracked.was_shown:
            shown.scheduled_cached_reqs.add(view, num_computed, block_ids, is_resumed=True)
        else:
            tracked.was_shown = True
            data = vllm.NewRequestData(
                request.request_id,
                view.prompt_token_ids,
                (block_ids,),
                num_computed,
                request.params,
                request.pooling_params,
            )
            shown.scheduled_new_reqs.append(data)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        ended = {name: load for name in (*output.loaded, *output.failed) if (load := self._loads.pop(name, None))}
        invalid = {block for name in output.failed if name in ended for block in ended[name].block_ids}
        for request_id in output.failed:
            if (tracked := self._requests.get(request_id)) is not None:
                tracked.shown_block_ids = None
        sent = output.sent & self._held
        self._held -= sent
        loaded = {name for name, load in ended.items() if load.is_async}
        self.connector.update_connector_output(vllm.KVConnectorOutput(sent or None, loaded or None, invalid))

    @property
    def has_pending(self) -> bool:
        return bool(self._undecided)

    def reset_cache(self, weights: str = "") -> None:
        for tracked in self._requests.values():
            tracked.shown_block_ids = None
        if type(self.connector).reset_cache is KVConnectorBase_V1.reset_cache:
            name = type(self.connector).__name__
            logger.warning("the KV connector %s has no reset_cache: it loads nothing from now on", name)
            self._loads_nothing = True
        self.connector.reset_cache()

    def shutdown(self) -> None:
        self.connector.shutdown()


# --- the worker side ------------------------------------------------------------------------------------------------


class VllmWorker(WorkerConnector):
    """Calls the methods of the worker side. The object is made with the KV cache, which its constructor describes."""

    def __init__(self, kind: type[KVConnectorBase_V1], context: TransferContext) -> None:
        self._kind, self._context = kind, context
        self._connector: KVConnectorBase_V1 | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._step: StepMetadata | None = None
        self._loading: dict[str, Load] = {}
        self._invalid: dict[str, set[int]] = {}  # of these

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        config = vllm.VllmConfig.of_context(self._context)
        first = 0 if self._context.model is None else vllm.layers_of(self._context.model, config.parallel_config).start
        names = vllm.layer_names(range(first, first + len(kv_caches)))
        self._kv_caches = dict(zip(names, kv_caches, strict=True))
        self._layers = {name: vllm.Facts(kv_cache=[kv_cache]) for name, kv_cache in self._kv_caches.items()}
        kv_cache_config = vllm.KVCacheConfig.of(layout.num_blocks, layout.block_size, names)
        self._connector = _make(self._kind, self._context, KVConnectorRole.WORKER, kv_cache_config)
        self._connector.register_kv_caches(dict(self._kv_caches))

    def bind_connector_metadata(self, metadata: object | None) -> None:
        if not isinstance(metadata, StepMetadata):
            raise TypeError(f"KV connector metadata is a {type(metadata).__name__}; it must be StepMetadata")
        self._step = metadata
        self._object.bind_connector_metadata(metadata.content)

    def flush(self) -> None:
        assert self._step is not None
        self._object.handle_preemptions(self._step.content)

    def start_load_kv(self) -> None:
        assert self._step is not None
        self._loading.update(self._step.loads)
        device = next(iter(self._kv_caches.values())).device
        if device.type == "cuda" and any(load.is_async for load in self._step.loads.values()):
            import torch  # a plan, which imports this module, needs none

            torch.cuda.current_stream(device).synchronize()  # queued steps may still use these blocks
        metadata = vllm.AttentionMetadata(self._step.queries, self._context.block_size, device)
        self._attn_metadata = dict.fromkeys(self._kv_caches, metadata)
        self._object.start_load_kv(vllm.ForwardContext(self._attn_metadata, self._layers))
        for name in self._kv_caches:
            self._object.wait_for_layer_load(name)

    def save_kv(self) -> None:
        assert self._step is not None
        if not self._step.queries and not self._loads_now:
            return  # no forward pass, and nothing that the connector has been shown
        for name, kv_cache in self._kv_caches.items():
            self._object.save_kv_layer(name, kv_cache, self._attn_metadata[name])
        self._object.wait_for_save()

    def wait_for_save(self) -> None:
        """`save_kv` has waited."""

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        sent, received = self._object.get_finished(finished_req_ids)
        invalid = self._object.get_block_ids_with_load_errors() or ()
        for request_id, load in self._loading.items():
            if failed := {block for block in load.block_ids if block in invalid}:
                self._invalid.setdefault(request_id, set()).update(failed)
        output = KVConnectorOutput(sent=set(sent or ()))
        for request_id in {*self._loads_now, *(received or ())}:
            if self._loading.pop(request_id, None) is None:
                logger.warning("the KV connector reports request %r as loaded, but it is not loading", request_id)
            elif failed := self._invalid.pop(request_id, set()):
                name, listed = self._kind.__name__, ", ".join(map(str, sorted(failed)))
                reason = f"the KV connector {name} could not load the blocks {listed} on rank {self._context.rank}"
                output.failed[request_id] = TransferFailure(reason)
            else:
                output.loaded.add(request_id)
        return output

    def clear_connector_metadata(self) -> None:
        self._step = None
        if self._connector is not None:
            self._connector.clear_connector_metadata()

    def wait_for_progress(self) -> None:
        if not self._loads_now:
            threading.Event().wait(_IDLE_S)

    def shutdown(self) -> None:
        if self._connector is not None:
            self._connector.shutdown()

    @property
    def _object(self) -> KVConnectorBase_V1:
        assert self._connector is not None  # register_kv_caches comes first
        return self._connector

    @property
    def _loads_now(self) -> list[str]:
        """Requests that this step loads synchronously."""
        return [] if self._step is None else [name for name, load in self._step.loads.items() if not load.is_async]
