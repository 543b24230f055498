"""The parts of an engine that its plan describes: the scheduler, its side of the KV connector, the loop, and the input
processor."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.input_processor import InputProcessor, params_check
from fleetfoot.engine.kv_events import KVEventPublisher
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.executor.build import start_executor
from fleetfoot.executor.protocol import Executor
from fleetfoot.plan.plan import EnginePlan, engine_fingerprint, transfer_context
from fleetfoot.records.kv_connector import NoSchedulerConnector, SchedulerConnector
from fleetfoot.records.kv_events import NO_KV_EVENTS, KVEvents
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.weights import WeightError
from fleetfoot.sampling.shape import mask_size
from fleetfoot.scheduler.config import SchedulerConfig
from fleetfoot.scheduler.drafting import DraftController
from fleetfoot.scheduler.ranks import AnyScheduler, SchedulerOfRanks, of_ranks
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.speculative.controller import AdaptiveDrafts
from fleetfoot.structured.compiler import GrammarCompiler
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.structured.masks import TokenMasker, num_mask_processes
from fleetfoot.structured.trial import GrammarTrial

if TYPE_CHECKING:
    from fleetfoot.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def _depth(plan: EnginePlan) -> int:
    """Steps in flight after which another one is queued: as many as keep every stage of a pipeline busy."""
    num_stages = plan.config.pipeline_parallel_size
    is_pipelined = num_stages > 1 and plan.config.async_scheduling is not False
    return num_stages if is_pipelined else int(plan.async_scheduling)


def make_mask_memory(plan: EnginePlan) -> MaskMemory:
    """What the engine computes token masks in, for its executor and for `build_core`."""
    max_masks = plan.config.max_num_seqs * (1 + plan.drafter.num_drafts)
    num_steps = (_depth(plan) + 2) * plan.config.num_data_ranks
    return MaskMemory(mask_size(plan.model.vocab_size), max_masks, num_steps=num_steps)


def build_core(plan: EnginePlan, executor: Executor, masks: MaskMemory) -> EngineCore:
    """The loop over a new scheduler and an executor that has started. Raises ValueError as `make_connectors`."""
    masker = TokenMasker(masks, num_mask_processes(plan.device))
    connectors = enumerate(make_connectors(plan))
    numbers = count()
    schedulers = [_build_scheduler(plan, executor.layout, connector, rank, numbers) for rank, connector in connectors]
    scheduler: AnyScheduler = schedulers[0]
    if len(schedulers) > 1:
        scheduler = SchedulerOfRanks(schedulers, plan.capture_table.agree)
    return EngineCore(scheduler, executor, StatsCollector(), masker=masker, depth=_depth(plan))


def check_weights(plan: EnginePlan, executor: Executor) -> None:
    """Raise WeightError if a file was replaced while the workers loaded it, or another node has other weights."""
    plan.weights.check()
    if plan.config.nnodes > 1 and plan.connector is not None:
        own, found = plan.weights.value(), executor.collective_rpc("weights_identity")
        for rank, identity in enumerate(found):
            if identity not in ("", own):
                node = rank // plan.config.local_world_size
                raise WeightError(
                    f"node {node} has loaded other weights, {identity}, than node 0, {own}; copy the files"
                )


def start_again(plan: EnginePlan, masks: MaskMemory) -> tuple[Executor, SchedulerConnector, int]:
    """New workers, and a new scheduler's side of the connector; see `fleetfoot.engine.restart.Rebuild`."""
    plan = replace(plan, engine_id=uuid.uuid4().hex)  # for other engines it is another one, without the old KV
    executor = start_executor(plan, masks)
    try:
        return executor, of_ranks(make_connectors(plan)), executor.layout.num_blocks
    except BaseException:
        executor.shutdown()
        raise


def _build_scheduler(
    plan: EnginePlan, layout: KVLayout, own_connector: SchedulerConnector, rank: int, numbers: Iterator[int]
) -> Scheduler:
    config, num_drafts, connector = plan.config, plan.drafter.num_drafts, plan.connector
    events: KVEvents = NO_KV_EVENTS
    if config.kv_events_config is not None and config.kv_events_config.is_active:
        events = KVEventPublisher(config.kv_events_config.moved(rank), layout.groups, layout.block_size)
    controller: DraftController | None = None
    if (speculative := config.speculative_config) is not None:
        kind = AdaptiveDrafts if speculative.adaptive else DraftController
        controller = kind(speculative.num_speculative_tokens, speculative.disable_by_batch_size)
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
            prompt_step_s=plan.prompt_step_s,
            groups=layout.groups,
            max_snapshots=config.max_state_snapshots,
            kv_load_failure_policy="recompute" if connector is None else connector.config.kv_load_failure_policy,
        ),
        connector=own_connector,
        controller=controller,
        weights="" if connector is None else engine_fingerprint(plan),
        events=events,
        numbers=numbers,
    )


def make_connectors(plan: EnginePlan) -> list[SchedulerConnector]:
    """The scheduler's side of the plan's KV connector for each data-parallel rank.

    Raises:
        ValueError: the connector's settings do not fit this engine.
    """
    firsts = range(0, plan.config.world_size, plan.config.replica_size)
    if plan.connector is None:
        return [NoSchedulerConnector() for _ in firsts]
    make = plan.connector.connector_class.scheduler_side
    return [make(transfer_context(plan, rank=first)) for first in firsts]


def load_tokenizer(plan: EnginePlan) -> Tokenizer | None:
    """The tokenizer, which can return tensors of torch; None: the engine runs on token ids only."""
    if plan.tokenizer_path is None:
        return None
    from fleetfoot.tokenizer.tokenizer import Tokenizer  # not needed for token ids

    tokenizer = Tokenizer.from_path(plan.tokenizer_path)
    tokenizer.tensor_types["pt"] = _make_tensor
    return tokenizer


def _make_tensor(values: Any) -> Any:
    """``torch.tensor``."""
    import torch

    return torch.tensor(values)


def build_input_processor(
    plan: EnginePlan, core: EngineCore, tokenizer: Tokenizer | None, sampling_defaults: dict[str, Any]
) -> InputProcessor:
    """What validates and tokenizes the requests of an engine."""
    return InputProcessor(
        vocab_size=plan.model.vocab_size,
        max_model_len=_served_model_len(plan, core.executor.layout),
        eos_token_ids=plan.model.eos_token_ids,
        tokenizer=tokenizer,
        max_logprobs=plan.config.max_logprobs,
        seed=plan.config.seed,
        sampling_defaults=sampling_defaults,
        pooling=plan.pooling,
        grammars=_grammar_compiler(plan, tokenizer, core.masker),
        check_further=params_check(plan),
    )


def _served_model_len(plan: EnginePlan, layout: KVLayout) -> int:
    """max_model_len; if it is not set, at most what the KV cache holds."""
    room = replace(plan.memory, num_blocks=layout.num_blocks).num_tokens
    if plan.config.max_model_len is not None or plan.max_model_len <= room:
        return plan.max_model_len
    message = "the model's %d positions do not fit in a KV cache of %d tokens: requests are limited to that"
    logger.warning(message, plan.max_model_len, room)
    return room


def _grammar_compiler(plan: EnginePlan, tokenizer: Tokenizer | None, masker: TokenMasker) -> GrammarCompiler:
    """An engine's compiler. Clients may make its texts, so it loads a tokenizer when the first grammar needs one."""
    load: Callable[[], Tokenizer] | None = None
    if (path := plan.tokenizer_path) is not None:

        def load() -> Tokenizer:
            from fleetfoot.tokenizer.tokenizer import Tokenizer

            return tokenizer or Tokenizer.from_path(path)

    vocab_size = plan.model.vocab_size
    ends = [token for token in plan.model.eos_token_ids if token < vocab_size]
    # without a tokenizer here, requests come from clients, which have compiled their grammars
    trial = None if tokenizer is None else GrammarTrial()
    return GrammarCompiler(load, vocab_size, ends, trial=trial, on_vocabulary=masker.start)
