"""A worker: one device and one model runner, built from the plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.distributed.groups import WorkerGroups
from fleetfoot.executor.protocol import WorkerBuild
from fleetfoot.kernels.registry import load_kernels
from fleetfoot.layers.context import ModelContext
from fleetfoot.plan.connector import qualified_name
from fleetfoot.plan.plan import EnginePlan, transfer_context
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.step_connector import NoConnector, StepConnector
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftSettings
from fleetfoot.weights.loading import ModelLoader

logger = logging.getLogger(__name__)


class Worker:
    """Loads the model, allocates the KV cache, and warms up. ``groups``: of the rank, from ``make_groups``; the device
    is the current one then. None: it is the only rank.

    Raises ValueError if the settings of a KV connector or of a drafter do not fit, and KernelUnavailableError if
    kernels that the plan names cannot be used.
    """

    def __init__(self, plan: EnginePlan, rank: int = 0, groups: WorkerGroups | None = None) -> None:
        self.plan = plan
        self.rank = rank
        self.groups = groups or WorkerGroups()
        self.device = torch.device(plan.device)
        if self.device.type == "cuda" and groups is not None:
            # with its number: threads that a connector starts have another current device
            self.device = torch.device("cuda", torch.cuda.current_device())
        kernels = load_kernels(plan.kernels)
        context = ModelContext(
            ops=kernels,
            attention=kernels.attention,
            dtype=getattr(torch, plan.dtype),
            device=self.device,
            max_positions=plan.max_model_len + plan.drafter.num_drafts,  # drafts may lie beyond a request's end
            tensor_group=self.groups.tensor,
        )
        self._layers: range | None = None
        if self.groups.pipeline.size > 1:
            self._layers = pipeline_layers(plan.model, self.groups.pipeline.rank, self.groups.pipeline.size)
        loader = ModelLoader(
            plan.model, context, plan.model_path, plan.config.load_format, plan.config.seed, self._layers
        )
        draft_settings, connector = self._make_speculation(context), make_connector(plan, rank)
        self._drafter = draft_settings.drafter
        self.runner = self._make_runner(loader, draft_settings, connector)
        self.build = WorkerBuild(
            runner=self.runner.name,
            kernels=str(kernels.plan),
            attention=context.attention.name,
            kv_layout=KVLayout.name,
            connector="none" if plan.connector is None else qualified_name(plan.connector.connector_class),
            drafter="ngram" if draft_settings.ngram is not None else getattr(self._drafter, "method", "none"),
            num_ranks=self.groups.tensor.size * self.groups.pipeline.size,
        )

    def _make_speculation(self, context: ModelContext) -> DraftSettings:
        """The drafter runs on the last pipeline stage; other stages receive its drafts."""
        plan = self.plan
        if plan.drafter.num_drafts == 0:
            return NO_DRAFTING
        if not self.groups.pipeline.is_last_rank:
            return DraftSettings(num_drafts=plan.drafter.num_drafts)
        from fleetfoot.speculative.drafter import build_speculation

        return build_speculation(plan.config, plan.drafter.model, plan.max_model_len, context, plan.drafter_fusion)

    def _make_runner(self, loader: ModelLoader, draft_settings: DraftSettings, connector: StepConnector) -> ModelRunner:
        plan = self.plan
        common: dict[str, Any] = {
            "max_num_seqs": plan.config.max_num_seqs,
            "max_model_len": plan.max_model_len,
            "draft_settings": draft_settings,
            "connector": connector,
            "pipeline": self.groups.pipeline,
        }
        if plan.runner == "v1":
            return ModelRunnerV1(loader, **common)
        return ModelRunnerV2(
            loader,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            capture_table=plan.capture_table,
            fusion=plan.fusion,
            **common,
        )

    def start(self) -> KVLayout:
        """Everything before the first step, each phase logged with its seconds; returns the KV cache's layout."""
        with _phase("weights"):
            self.runner.load_model()
        self.build = replace(
            self.build,
            fused_layers=self.runner.fused_layers,
            fused_drafter_layers=getattr(self._drafter, "fused_layers", ()),  # a drafter may have no layers
        )
        with _phase("KV cache"):
            layout = self._layout()
            try:
                self.runner.initialize_kv_cache(layout)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ValueError(
                    f"no memory for a KV cache of {layout.num_blocks:,} blocks ({layout.num_bytes:,} bytes, from "
                    f"{self.plan.memory.kv_reason}) and the state of max_num_seqs={self.plan.config.max_num_seqs:,} "
                    f"requests: {error}; lower num_gpu_blocks_override, kv_cache_memory_bytes or max_num_seqs"
                ) from error
        with _phase("warm-up"):
            self.runner.warm_up()
        self.layout = layout
        return layout

    def _layout(self) -> KVLayout:
        """Of this rank's layers, with as many blocks as fit on all ranks; the last stage has a drafter's layers too."""
        plan = self.plan
        num_blocks = self._fitting_blocks()
        if self.build.num_ranks > 1:
            smallest = torch.tensor([num_blocks])
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
            num_blocks = int(smallest.item())
        size = self.groups.tensor.size
        layout = KVLayout.of(
            plan.model, num_blocks, plan.config.block_size, plan.dtype, tensor_parallel_size=size, layers=self._layers
        )
        return layout.with_layers(plan.drafter.kv_specs) if self.groups.pipeline.is_last_rank else layout

    def _fitting_blocks(self) -> int:
        """The plan's number of KV blocks, or fewer if the GPU has less free memory than the plan counts on."""
        memory, config = self.plan.memory.stage(self.groups.pipeline.rank), self.plan.config
        if self.device.type == "cpu" or config.num_gpu_blocks_override or config.kv_cache_memory_bytes:
            return memory.num_blocks
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


def make_connector(plan: EnginePlan, rank: int) -> StepConnector:
    """The worker's side of the plan's KV connector; raises ValueError if its settings do not fit this engine."""
    if plan.connector is None:
        return NoConnector()
    return StepConnector(plan.connector.connector_class.worker_side(transfer_context(plan, rank=rank)))


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Log how long a phase of the start takes."""
    begin = time.perf_counter()
    yield
    logger.info("%s: %.2f s", name, time.perf_counter() - begin)
