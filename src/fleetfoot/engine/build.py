"""Puts an engine together from its settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfoot.attention.kv_layout import KVLayout
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.admission import Admission
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.execution.executor import InProcessExecutor
from fleetfoot.execution.worker import Worker
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    plan: EnginePlan
    layout: KVLayout
    core: EngineCore
    admission: Admission
    tokenizer: Tokenizer | None


def build_parts(config: EngineConfig) -> EngineParts:
    """Plan, load, and take memory.

    Raises:
        ValueError: settings, model and machine do not fit together, or ask for what no runner supports.
    """
    plan = resolve_plan(config, Machine.detect())
    plan.decision.check()
    for warning in plan.warnings:
        logger.warning(warning)
    for reason in plan.reasons:
        logger.info(reason)
    tokenizer = None if plan.tokenizer_path is None else _load_tokenizer(plan.tokenizer_path)
    worker = Worker(plan)
    layout = worker.start()
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            priority=config.scheduling_policy == "priority",
        )
    )
    admission = Admission(
        vocab_size=plan.model.vocab_size,
        max_model_len=_served_model_len(plan, layout),
        eos_token_ids=plan.model.eos_token_ids,
        tokenizer=tokenizer,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
    )
    core = EngineCore(scheduler, InProcessExecutor(worker), StatsCollector(), depth=int(plan.async_scheduling))
    return EngineParts(plan, layout, core, admission, tokenizer)


def _load_tokenizer(path: Path) -> Tokenizer:
    from fleetfoot.tokenizer.tokenizer import Tokenizer  # an engine on token ids alone does without its libraries

    return Tokenizer.from_path(path)


def _served_model_len(plan: EnginePlan, layout: KVLayout) -> int:
    """max_model_len, or less where nobody asked for it and the KV cache holds less."""
    room = layout.num_blocks * layout.block_size
    if plan.config.max_model_len is not None or plan.max_model_len <= room:
        return plan.max_model_len
    logger.warning(
        "the model's %d positions do not fit in a KV cache of %d tokens: requests are limited to that",
        plan.max_model_len,
        room,
    )
    return room
