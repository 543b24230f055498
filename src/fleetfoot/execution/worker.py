"""A worker: one device, one model runner, and the order in which they start."""

from __future__ import annotations

import logging
import time

import torch

from fleetfoot.attention.kv_layout import KVLayout
from fleetfoot.attention.select import select_attention
from fleetfoot.layers.context import ModelContext
from fleetfoot.ops.select import select_ops
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.runner.contract import ModelRunner
from fleetfoot.runner.load import ModelLoader
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.runner.v2.runner import ModelRunnerV2

logger = logging.getLogger(__name__)


class Worker:
    """Loads the model, sizes and takes the KV cache, and warms up, each phase logged with its seconds."""

    def __init__(self, plan: EnginePlan) -> None:
        self.plan = plan
        self.device = torch.device(plan.device)
        dtype = getattr(torch, plan.dtype)
        ops = select_ops(plan.device)
        context = ModelContext(
            ops=ops,
            attention=select_attention(plan.device),
            dtype=dtype,
            device=self.device,
            max_positions=plan.max_model_len,
        )
        loader = ModelLoader(plan.model, context, plan.model_path, plan.config.load_format, plan.config.seed)
        self.runner: ModelRunner
        if plan.runner == "v2":
            self.runner = ModelRunnerV2(
                loader,
                max_num_seqs=plan.config.max_num_seqs,
                max_num_batched_tokens=plan.max_num_batched_tokens,
                max_model_len=plan.max_model_len,
                capture_table=plan.capture_table,
            )
        else:
            self.runner = ModelRunnerV1(loader, max_num_seqs=plan.config.max_num_seqs, max_model_len=plan.max_model_len)

    def start(self) -> KVLayout:
        """Everything up to the first step; returns the KV cache's layout."""
        with _Phase("weights"):
            self.runner.load_model()
        with _Phase("KV cache"):
            layout = KVLayout.of(self.plan.model, self._num_blocks(), self.plan.config.block_size, self.plan.dtype)
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
        return layout

    def _num_blocks(self) -> int:
        """The plan's number of KV blocks, or fewer where a GPU turns out to have less to give than the plan saw."""
        memory, config = self.plan.memory, self.plan.config
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


class _Phase:
    """Logs how long a phase of the start took."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        logger.info("%s: %.2f s", self._name, time.perf_counter() - self._begin)
