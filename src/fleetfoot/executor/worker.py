"""A worker: one device, one model runner, and the order in which they start."""

from __future__ import annotations

import logging
import time

import torch

from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.distributed.groups import WorkerGroups
from fleetfoot.kernels.select import select_attention, select_ops
from fleetfoot.layers.context import ModelContext
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.transfer_context import transfer_context
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.runner.contract import ModelRunner
from fleetfoot.runner.step_connector import NoConnector, StepConnector
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.speculative.speculation import NO_SPECULATION, Speculation
from fleetfoot.weights.model_loader import ModelLoader

logger = logging.getLogger(__name__)


class Worker:
    """Loads the model, sizes and takes the KV cache, and warms up, each phase logged with its seconds.

    Args:
        rank: in the world of tensor_parallel_size * pipeline_parallel_size workers.
        groups: its groups in there, of ``make_groups``; the device is the current one then. None: it is alone.

    Raises:
        ValueError: the settings of a KV connector or of a drafter do not fit.
    """

    def __init__(self, plan: EnginePlan, rank: int = 0, groups: WorkerGroups | None = None) -> None:
        self.plan = plan
        self.rank = rank
        self._is_alone = groups is None
        self.groups = groups or WorkerGroups()
        self.device = torch.device(plan.device)
        if self.device.type == "cuda" and groups is not None:
            # by its number: threads that a connector starts have another current device
            self.device = torch.device("cuda", torch.cuda.current_device())
        num_drafts = plan.drafter.num_drafts
        context = ModelContext(
            ops=select_ops(plan.device),
            attention=select_attention(plan.device),
            dtype=getattr(torch, plan.dtype),
            device=self.device,
            max_positions=plan.max_model_len + num_drafts,  # a query may reach beyond the end by its drafts
            tensor_group=self.groups.tensor,
        )
        self._layers: range | None = None
        if self.groups.pipeline.size > 1:
            self._layers = pipeline_layers(plan.model, self.groups.pipeline.rank, self.groups.pipeline.size)
        loader = ModelLoader(
            plan.model, context, plan.model_path, plan.config.load_format, plan.config.seed, self._layers
        )
        self.runner = self._make_runner(loader, self._speculation(context, num_drafts), make_connector(plan, rank))

    def _speculation(self, context: ModelContext, num_drafts: int) -> Speculation:
        """The drafter lives on the last rank of a pipeline; the others only hear what it proposes."""
        if num_drafts == 0:
            return NO_SPECULATION
        if not self.groups.pipeline.is_last_rank:
            return Speculation(num_drafts=num_drafts)
        from fleetfoot.speculative.build import build_speculation

        plan = self.plan
        return build_speculation(plan.config, plan.drafter.model, plan.max_model_len, context)

    def _make_runner(self, loader: ModelLoader, speculation: Speculation, connector: StepConnector) -> ModelRunner:
        plan = self.plan
        if plan.runner == "v2":
            return ModelRunnerV2(
                loader,
                max_num_seqs=plan.config.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                max_model_len=plan.max_model_len,
                capture_table=plan.capture_table,
                speculation=speculation,
                connector=connector,
                pipeline=self.groups.pipeline,
            )
        return ModelRunnerV1(
            loader,
            max_num_seqs=plan.config.max_num_seqs,
            max_model_len=plan.max_model_len,
            speculation=speculation,
            connector=connector,
            pipeline=self.groups.pipeline,
        )

    def start(self) -> KVLayout:
        """Everything up to the first step; returns the KV cache's layout."""
        with _Phase("weights"):
            self.runner.load_model()
        with _Phase("KV cache"):
            layout = self._layout(self._num_blocks())
            try:
                self.runner.initialize_kv_cache(layout)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ValueError(
                    f"no memory for a KV cache of {layout.num_blocks:,} blocks ({layout.num_bytes:,} bytes, from "
                    f"{self.plan.memory.kv_reason}) and the state of max_num_seqs={self.plan.config.max_num_seqs:,} "
                    f"requests: {error}; lower num_gpu_blocks_override, kv_cache_memory_bytes or max_num_seqs"
                ) from error
        with _Phase("warm-up"):
            self.runner.warm_up()
        self.layout = layout
        return layout

    def _layout(self, num_blocks: int) -> KVLayout:
        """Of this rank: its layers of the model, and on the last rank of a pipeline those of a drafter."""
        plan = self.plan
        layout = KVLayout.of(
            plan.model,
            num_blocks,
            plan.config.block_size,
            plan.dtype,
            tensor_parallel_size=self.groups.tensor.size,
            layers=self._layers,
        )
        return layout.with_groups(plan.drafter.layer_groups) if self.groups.pipeline.is_last_rank else layout

    def _num_blocks(self) -> int:
        """KV blocks that fit on all ranks."""
        own = self._fitting_blocks()
        if self._is_alone:
            return own
        from fleetfoot.distributed.torch_groups import smallest_in_world

        return smallest_in_world(own)

    def _fitting_blocks(self) -> int:
        """The plan's number of KV blocks, or fewer where a GPU turns out to have less to give than the plan saw."""
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
                f"plan counts on {memory.footprint.taken_by_loading:,}; end what else runs on the GPU, or raise "
                f"gpu_memory_utilization (now {config.gpu_memory_utilization})"
            )
        logger.warning(
            "the KV cache gets %d blocks instead of the planned %d: %d bytes of the GPU are taken after loading, where "
            "the plan counts on %d",
            fitting,
            memory.num_blocks,
            total - free,
            memory.footprint.taken_by_loading,
        )
        return fitting

    def shutdown(self) -> None:
        self.runner.shutdown()


def make_connector(plan: EnginePlan, rank: int) -> StepConnector:
    """The worker's side of the plan's KV connector.

    Args:
        rank: of the worker, 0 .. world_size - 1.

    Raises:
        ValueError: the connector's settings do not fit this engine.
    """
    if plan.connector is None:
        return NoConnector()
    return StepConnector(plan.connector.connector_class.worker_side(transfer_context(plan, rank=rank)))


class _Phase:
    """Logs how long a phase of the start took."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        logger.info("%s: %.2f s", self._name, time.perf_counter() - self._begin)
