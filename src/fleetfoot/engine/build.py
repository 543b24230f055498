"""Puts an engine together from its settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.speculative import SpeculativeConfig
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.input_processor import InputProcessor
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.executor.build import start_executor
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan, transfer_context
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.records.kv_connector import NoSchedulerConnector, SchedulerConnector
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.sampling.request_params import read_sampling_defaults
from fleetfoot.scheduler.drafting import ConstantDrafts, DraftController
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig
from fleetfoot.speculative.controller import AdaptiveDrafts

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine."""

    plan: EnginePlan
    layout: KVLayout
    core: EngineCore
    input_processor: InputProcessor
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
    sampling_defaults = read_sampling_defaults(
        config.generation_config, config.override_generation_config, plan.model_path
    )
    if sampling_defaults:
        logger.info("sampling defaults that come with the model or the settings: %s", sampling_defaults)
    tokenizer = None if plan.tokenizer_path is None else _load_tokenizer(plan.tokenizer_path)
    executor, layout = start_executor(plan)
    try:
        scheduler = _build_scheduler(plan, layout)
    except BaseException:
        executor.shutdown()
        raise
    input_processor = InputProcessor(
        vocab_size=plan.model.vocab_size,
        max_model_len=_served_model_len(plan, layout),
        eos_token_ids=plan.model.eos_token_ids,
        tokenizer=tokenizer,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
        sampling_defaults=sampling_defaults,
    )
    core = EngineCore(scheduler, executor, StatsCollector(), depth=_depth(plan))
    return EngineParts(plan, layout, core, input_processor, tokenizer)


def _build_scheduler(plan: EnginePlan, layout: KVLayout) -> Scheduler:
    config, num_drafts, connector = plan.config, plan.drafter.num_drafts, plan.connector
    return Scheduler(
        SchedulerConfig(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            priority=config.scheduling_policy == "priority",
            num_drafts=num_drafts,
            num_lookahead=num_drafts if plan.drafter.kv_specs else 0,  # for a drafter that keeps KV too
            num_stages=config.pipeline_parallel_size,
            kv_load_failure_policy="recompute" if connector is None else connector.config.kv_load_failure_policy,
        ),
        connector=make_connector(plan),
        controller=_draft_controller(config.speculative_config),
    )


def make_connector(plan: EnginePlan) -> SchedulerConnector:
    """The scheduler's side of the plan's KV connector.

    Raises:
        ValueError: the connector's settings do not fit this engine.
    """
    if plan.connector is None:
        return NoSchedulerConnector()
    return plan.connector.connector_class.scheduler_side(transfer_context(plan))


def _draft_controller(speculative: SpeculativeConfig | None) -> DraftController | None:
    if speculative is None:
        return None
    kind = AdaptiveDrafts if speculative.adaptive else ConstantDrafts
    return kind(speculative.num_speculative_tokens, speculative.disable_by_batch_size)


def _depth(plan: EnginePlan) -> int:
    """Steps in flight behind which another one is queued: as many as keep every stage of the pipeline busy."""
    stages = plan.config.pipeline_parallel_size
    if stages > 1 and plan.config.async_scheduling is not False:
        return stages
    return int(plan.async_scheduling)


def _load_tokenizer(path: Path) -> Tokenizer:
    from fleetfoot.tokenizer.tokenizer import Tokenizer  # not needed for token ids

    return Tokenizer.from_path(path)


def _served_model_len(plan: EnginePlan, layout: KVLayout) -> int:
    """max_model_len; if it is not set, at most what the KV cache holds."""
    room = layout.num_blocks * layout.block_size
    if plan.config.max_model_len is not None or plan.max_model_len <= room:
        return plan.max_model_len
    logger.warning(
        "the model's %d positions do not fit in a KV cache of %d tokens: requests are limited to that",
        plan.max_model_len,
        room,
    )
    return room
