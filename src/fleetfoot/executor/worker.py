"""A worker: one device and one model runner, built from the plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fleetfoot.config.engine import Dtype, EngineConfig
from fleetfoot.config.eplb import EPLBConfig
from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.distributed import cleanup_dist_env_and_memory
from fleetfoot.distributed.groups import SINGLE_RANK, ExpertGroup, Groups
from fleetfoot.eplb.balancer import Balancer
from fleetfoot.executor.profiling import WorkerProfiler
from fleetfoot.executor.protocol import check_parts
from fleetfoot.kernels.cpu_threads import StepThreads
from fleetfoot.kernels.registry import load_kernels
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead
from fleetfoot.kernels.runtime.compile_worker import CompilePool
from fleetfoot.layers.context import ModelContext
from fleetfoot.plan.connector import qualified_name
from fleetfoot.plan.plan import EnginePlan, transfer_context
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import PendingOutput, SchedulerOutput, TokenMasks
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.capabilities import V1_ROOM
from fleetfoot.runner.step_connector import NoConnector, StepConnector
from fleetfoot.runner.v2.padding_work import open_compiler
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.sampling.custom_processors import EngineProcessor
from fleetfoot.speculative.drafter import DraftSettings, build_speculation
from fleetfoot.utils.memory import release_code, trim_heap, use_huge_pages
from fleetfoot.utils.progress import report_progress
from fleetfoot.utils.validation import FieldError
from fleetfoot.weights.loading import ModelLoader
from fleetfoot.weights.sleep import TAGS, make_sleep_memory
from fleetfoot.weights.store import StageReport
from fleetfoot.weights.transfer import WeightTransferInitInfo

logger = logging.getLogger(__name__)


class Worker:
    """Implements `fleetfoot.executor.protocol.Executor` for one rank. ``groups``: from ``make_groups``, for the current
    device; None: it is the only rank. ``ahead``: as of `ModelRunnerV2`. ``device``: None: the plan's.

    Raises ValueError if the settings of a KV connector or of a drafter do not fit, and KernelUnavailableError if
    kernels that the plan names cannot be used.
    """

    layout: KVLayout

    def __init__(
        self,
        plan: EnginePlan,
        rank: int = 0,
        groups: Groups | None = None,
        ahead: CompileAhead | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self._groups = groups or SINGLE_RANK
        self.device = device or torch.device(plan.device)
        if self.device.type == "cuda" and groups is not None:
            # with its number: threads that a connector starts have another current device
            self.device = torch.device("cuda", torch.cuda.current_device())
        kernels, pipeline = load_kernels(plan.kernels, native_variant=plan.native_variant), self._groups.pipeline
        self._context = context = ModelContext(
            ops=kernels,
            attention=kernels.attention,
            dtype=getattr(torch, plan.dtype),
            device=self.device,
            max_positions=plan.max_model_len + plan.drafter.num_drafts,  # drafts may lie beyond a request's end
            groups=self._groups,
            linear_methods=plan.linear_methods,
            expert_split=plan.config.expert_split,
            first_placements=plan.expert_placements,
            has_fp8_kv=plan.kv_dtype != plan.dtype,
        )
        self._layers = pipeline_layers(plan.model, pipeline.rank, pipeline.size)
        loader = ModelLoader(
            plan.model, context, plan.model_path, plan.config.load_format, plan.config.seed, self._layers
        )
        self._draft_settings = self._make_draft_settings()
        common: dict[str, Any] = {
            "max_num_seqs": plan.config.max_num_seqs,
            "max_model_len": plan.max_model_len,
            "draft_settings": self._draft_settings,
            "connector": make_connector(plan, rank),
            "memory": make_sleep_memory(self.device, is_enabled=plan.config.enable_sleep_mode),
        }
        self._profiler = WorkerProfiler(plan.config.profiler_config, rank, self.device)
        self._asleep: set[str] = set()
        self.balancer: Balancer | None = None
        if plan.config.enable_eplb:
            common["barrier"] = self.balancer = make_balancer(plan.config, self._groups.expert)
        self.runner: ModelRunner
        if plan.runner == "v1":
            common["compiles_layers"] = plan.config.compiles_layers
            if plan.pooling is None:
                resolved = replace(plan.config, max_model_len=plan.max_model_len, dtype=cast("Dtype", plan.dtype))
                processors = [EngineProcessor(kind, resolved, self.device) for kind in plan.logits_processors]
                self.runner = import_module(f"{V1_ROOM}.runner").ModelRunnerV1(
                    loader, logits_processors=processors, **common
                )
            else:
                kind = import_module(f"{V1_ROOM}.pooling").PoolingModelRunner
                self.runner = kind(loader, pooling=plan.pooling, **common)
        else:
            self.runner = ModelRunnerV2(
                loader,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                capture_table=plan.capture_table,
                fusion=plan.fusion,
                ahead=ahead,
                **common,
            )
        self.runner_name = self.runner.name
        self.execute_model, self.sample_tokens = self.runner.execute_model, self.runner.sample_tokens
        if plan.device == "cpu":
            self._threads = StepThreads()
            self.execute_model, self.sample_tokens = self._execute_on_cpu, self._sample_on_cpu
        self.samples = pipeline.is_last_rank
        """Whether steps end with tokens on this rank."""

    @classmethod
    def of_only_rank(cls, plan: EnginePlan, pool: CompilePool | None) -> Worker:
        """``pool``: as of `open_compiler`."""
        ahead = open_compiler(1, torch.device(plan.device), pool) if plan.compiles_kernels else None
        return cls(plan, ahead=ahead)

    # methods, not functions around those of the runner, which tracebacks of an engine that has failed would hold

    def _execute_on_cpu(self, scheduler_output: SchedulerOutput) -> None:
        with self._threads:
            self.runner.execute_model(scheduler_output)

    def _sample_on_cpu(self, masks: TokenMasks | None) -> PendingOutput:
        with self._threads:
            return self.runner.sample_tokens(masks)

    def _make_draft_settings(self) -> DraftSettings:
        """The drafter runs on the last pipeline stage; other stages receive its drafts."""
        plan, drafter = self.plan, self.plan.drafter
        if not self._groups.pipeline.is_last_rank:
            return DraftSettings(num_drafts=drafter.num_drafts)
        context = replace(self._context, linear_methods=drafter.linear_methods)
        return build_speculation(plan.config, drafter.model, plan.max_model_len, context, plan.drafter_fusion)

    def prepare(self) -> None:
        """Load the weights, and allocate the KV cache. Raises PlanMismatchError: something was built that the plan does
        not name."""
        if self.plan.connector is not None and self.rank and self.rank % self.plan.config.local_world_size == 0:
            self.plan.weights.start()  # another node's files; see `weights_identity`
        self._release_memory()  # of the imports
        with phase("weights"):
            self.runner.load_model()
        self._release_memory()
        if self.balancer is not None:
            self.balancer.attach(self.runner.model, self.runner.weights)
        check_parts(self.plan, self.rank, self.parts())  # before the ranks wait for each other
        with phase("KV cache"):
            self.layout = layout = self._make_layout()
            try:
                self.runner.initialize_kv_cache(layout)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ValueError(
                    f"no memory for a KV cache of {layout.num_blocks:,} blocks ({layout.num_bytes:,} bytes, from "
                    f"{self.plan.memory.kv_reason}) and the state of max_num_seqs={self.plan.config.max_num_seqs:,} "
                    f"requests: {error}; lower num_gpu_blocks_override, kv_cache_memory_bytes or max_num_seqs"
                ) from error
        check_parts(self.plan, self.rank, self.parts())

    def start(self) -> None:
        """Everything before the first step, each phase logged with its seconds. Raises as `prepare`."""
        self.prepare()
        with phase("warm-up"):
            self.runner.warm_up()
        if self.device.type == "cpu":
            use_huge_pages(self.runner.weights.stored())
        self._release_memory()

    def _release_memory(self) -> None:
        """Give back what a phase of the start has used, before the next one takes memory."""
        if self.device.type == "cpu":
            release_code()
        trim_heap()

    @property
    def model_runner(self) -> ModelRunner:
        """vLLM's name of ``runner``, which functions of `collective_rpc` use."""
        return self.runner

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """See `Executor`; this is the only rank."""
        return [self.call(method, args, kwargs or {})]

    def call(self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the worker, or its method of this name. Raises ValueError: there is no such method."""
        function = method if callable(method) else getattr(type(self), str(method), None)
        if function is None:
            raise FieldError(
                "method", f"is {method!r}, which a worker does not have; give a function of the worker", method
            )
        return function(self, *args, **kwargs)

    def call_weights(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of this rank's `WeightStore`."""
        return getattr(self.runner.weights, method)(*args, **kwargs)

    def save_weights(self, folder: str, names: Sequence[str]) -> str:
        """See `WeightStore.save`; each rank has its own files in the folder."""
        return self.runner.weights.save(Path(folder) / str(self.rank), names)

    def stage_saved(self, folder: str, names: Sequence[str]) -> StageReport:
        """See `WeightStore.stage_saved`."""
        return self.runner.weights.stage_saved(Path(folder) / str(self.rank), names)

    def weights_identity(self) -> str:
        """The identity of the files that the ranks of this node have read; empty on all but the node's first."""
        if self.rank % self.plan.config.local_world_size:
            return ""
        self.plan.weights.check()
        return self.plan.weights.value()

    def connect_weights(self, info: WeightTransferInitInfo, backend: str) -> None:
        """Join a trainer's group."""
        self.runner.weights.connect(info, info.rank_offset + self.rank, backend)

    def balance_report(self) -> dict[str, Any] | None:
        """`BalanceReport` as a dictionary; None: experts are not balanced."""
        return None if self.balancer is None else asdict(self.balancer.report)

    def compiled_kernels(self) -> tuple[int, int]:
        """`CompiledKernels` of the start."""
        return self.runner.kernels

    # --- profile ----------------------------------------------------------------------------------------------------

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """See `LLMEngine.start_profile`."""
        self._profiler.start(profile_prefix)

    def stop_profile(self) -> str:
        """See `LLMEngine.stop_profile`."""
        return self._profiler.stop()

    # --- sleep ------------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """See `LLMEngine.sleep`. Raises ValueError: the level is unknown, or the engine cannot sleep; MemoryError: the
        host has no memory for the weights."""
        if level not in (1, 2):
            raise ValueError(f"level is {level!r}; it can be 1 (weights move to the host) or 2 (weights are dropped)")
        if self._asleep:
            logger.warning("worker %d sleeps already", self.rank)
            return
        with phase(f"sleep at level {level}"):
            self.runner.sleep(level)
        self._asleep = set(TAGS)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `LLMEngine.wake_up`. Raises torch.OutOfMemoryError: the device has no memory; call it again."""
        for tag in TAGS:
            if tag in self._asleep and (tags is None or tag in tags):
                with phase(f"wake-up of {tag}"):
                    self.runner.wake_up(tag)
                self._asleep.discard(tag)

    def reload_lost_drafter(self) -> None:
        """Read the weights of the drafter from its checkpoint again, if sleep has dropped them."""
        drafter = self._draft_settings.drafter
        if self.runner.weights.mark_drafter_reloaded() and drafter is not None:
            drafter.reload_weights()

    def shutdown(self) -> None:
        """Free the memory, also while this object is referenced. Does nothing when called again."""
        if hasattr(self, "runner"):
            runner = self.runner
            del self.runner, self.execute_model, self.sample_tokens, self._draft_settings
            runner.shutdown()

    def parts(self) -> dict[str, object]:
        """What has been built, once the weights are loaded; see `planned_parts`."""
        connector, drafter = self.plan.connector, self._draft_settings.drafter
        method = "none" if drafter is None else drafter.method
        layout = {"kv_layout": self.runner.kv_layout} if self.runner.kv_layout else {}  # set with the KV cache
        return {
            **layout,
            "runner": self.runner_name,
            "kernels": str(self._context.ops.plan),
            "attention": self._context.attention.name,
            "connector": "none" if connector is None else qualified_name(connector.connector_class),
            "drafter": method if self._draft_settings.ngram is None else "ngram",
            "ranks": {name: group.size for name, group in self._groups.items()},
            "fused_layers": self.runner.fused_layers,
            "fused_drafter_layers": () if drafter is None else drafter.fused_layers,
        }

    def _make_layout(self) -> KVLayout:
        """The layout of this rank's layers, a drafter's included, with as many blocks as fit on all ranks."""
        plan, size, pipeline = self.plan, self._groups.tensor.size, self._groups.pipeline
        num_blocks = self._fitting_blocks()
        if self.plan.config.world_size > 1:
            smallest = torch.tensor([num_blocks])
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
            num_blocks = int(smallest.item())
        layout = KVLayout.of(
            plan.model,
            num_blocks,
            plan.config.block_size,
            plan.dtype,
            tensor_parallel_size=size,
            layers=self._layers,
            name=plan.kv_layout,
            groups=plan.memory.groups,
            kv_dtype=plan.kv_dtype,
        )
        return layout.with_layers(plan.drafter.kv_specs) if pipeline.is_last_rank else layout

    def _fitting_blocks(self) -> int:
        """The plan's number of KV blocks, or fewer if the GPU has less free memory than the plan counts on."""
        memory, config = self.plan.memory.stage(self._groups.pipeline.rank), self.plan.config
        if self.device.type != "cuda" or config.num_gpu_blocks_override or config.kv_cache_memory_bytes:
            return memory.num_blocks
        free, total = torch.cuda.mem_get_info(self.device)
        if memory.fitting_blocks(total - free) < memory.num_blocks:
            cleanup_dist_env_and_memory()  # an engine that ended in this process, which torch's allocator still holds
            free, total = torch.cuda.mem_get_info(self.device)
        fitting = memory.fitting_blocks(total - free)
        if fitting >= memory.num_blocks:
            return memory.num_blocks
        if fitting < 1:
            raise ValueError(
                f"no KV block fits: {total - free:,} of the GPU's {total:,} bytes are taken after loading, where the "
                f"plan counts on {memory.taken_by_loading:,}; end what else runs on the GPU, or raise "
                f"gpu_memory_utilization (now {config.gpu_memory_utilization})"
            )
        logger.warning(
            "the KV cache gets %d blocks instead of the planned %d: %d bytes of the GPU are taken after loading, where "
            "the plan counts on %d",
            fitting,
            memory.num_blocks,
            total - free,
            memory.taken_by_loading,
        )
        return fitting


def make_balancer(config: EngineConfig, group: ExpertGroup) -> Balancer:
    """What balances experts, by the settings. The ranks of a group are on consecutive machines."""
    split = config.expert_split
    assert split is not None
    num_nodes = max(1, group.size // config.local_world_size)
    settings = config.eplb_config or EPLBConfig()
    return Balancer(settings, split, group, num_nodes, config.tensor_parallel_size)


def make_connector(plan: EnginePlan, rank: int) -> StepConnector:
    """The worker's side of the plan's KV connector; raises ValueError if its settings do not fit this engine."""
    if plan.connector is None:
        return NoConnector()
    return StepConnector(plan.connector.connector_class.worker_side(transfer_context(plan, rank=rank)))


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log how long a phase of the start takes."""
    begin = time.perf_counter()
    report_progress(name)
    yield
    logger.info("%s: %.2f s", name, time.perf_counter() - begin)
