"""A worker: one device, one model runner, and the order in which they start."""

from __future__ import annotations

import logging
import time

import torch

from fleetfoot.attention.kv_layout import KVLayout
from fleetfoot.attention.select import select_attention
from fleetfoot.layers.context import ModelContext
from fleetfoot.ops.select import select_ops
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.memory import activation_bytes, kv_budget
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
            budget = kv_budget(self.plan, self._free_bytes())
            layout = KVLayout.of(self.plan.model, budget.num_blocks, self.plan.config.block_size, self.plan.dtype)
            try:
                self.runner.initialize_kv_cache(layout)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise ValueError(
                    f"no memory for a KV cache of {layout.num_blocks:,} blocks ({layout.num_bytes:,} bytes, from "
                    f"{budget.reason}) and the state of max_num_seqs={self.plan.config.max_num_seqs:,} requests: "
                    f"{error}; lower num_gpu_blocks_override, kv_cache_memory_bytes or max_num_seqs"
                ) from error
        with _Phase("warm-up"):
            self.runner.warm_up()
        return layout

    def _free_bytes(self) -> int:
        if self.device.type == "cpu":
            return Machine.detect().cpu_memory_bytes
        free, total = torch.cuda.mem_get_info(self.device)
        may_use = int(total * self.plan.config.gpu_memory_utilization)
        return may_use - (total - free) - activation_bytes(self.plan)

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
