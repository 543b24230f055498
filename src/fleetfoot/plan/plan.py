"""The plan: everything about an engine that follows from its settings, the model and the machine, decided once."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fleetfoot.config.engine import KV_DTYPES, MAX_RESTARTS, EngineConfig
from fleetfoot.config.model import ModelConfig
from fleetfoot.config.pooling import Pooling
from fleetfoot.fusion import LayerFusion
from fleetfoot.kernels.interface import NO_LAYER_CHAIN, KernelPlan, LayerChainPlan
from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.plan.connector import ConnectorPlan
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.memory import MemoryPlan
from fleetfoot.plan.oracle import Decision, Unsupported
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.speculative.find import NO_DRAFTER, DrafterShape
from fleetfoot.weights.files import SINGLE_FILE
from fleetfoot.weights.identity import WeightsIdentity, digest_of

if TYPE_CHECKING:
    from fleetfoot.sampling.custom_processors import LogitsProcessor


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Immutable; everything that depends on a choice reads it here."""

    config: EngineConfig
    machine: Machine
    model: ModelConfig
    model_path: Path
    tokenizer_path: Path | None
    """None: prompts are token ids."""
    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    decision: Decision
    """Which model runner, and why."""
    kernels: KernelPlan
    """Attention and operations of the model's layers."""
    kv_layout: str
    """Name of the KV cache's layout (`fleetfoot.kv_transfer.base.registry`)."""
    max_model_len: int
    """The setting; without it the model's own limit, or as much of it as there is room for."""
    max_num_batched_tokens: int
    prompt_step_s: float | None
    """Seconds that the prompts in a step take at most while several clients have requests; None: any."""
    async_scheduling: bool
    """Whether step N+1 is scheduled before the tokens of step N are known."""
    capture_table: CaptureTable
    """The batch shapes that are captured as graphs."""
    memory: MemoryPlan
    fusion: tuple[LayerFusion, ...]
    """Whether each decoder layer is fused, and why."""
    asked_max_num_seqs: int | None = None
    """The setting; ``config`` has fewer if there is no room for their recurrent states. None: the same."""
    connector: ConnectorPlan | None = None
    """The active KV connector."""
    drafter: DrafterShape = NO_DRAFTER
    """What speculative decoding adds on the last rank of a pipeline, and the model that drafts."""
    layer_chain: LayerChainPlan = NO_LAYER_CHAIN
    """Steps in which two kernels compute a fused layer."""
    linear_methods: LinearMethods = UNQUANTIZED
    """How the model's linear layers store and apply their weights; a drafter's: see `DrafterShape`."""
    expert_placements: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """See `ModelContext.first_placements`."""
    drafter_fusion: tuple[LayerFusion, ...] = ()
    """The same for each decoder layer of the model that drafts."""
    pooling: Pooling | None = None
    """What is computed of prompts; None: text is generated."""
    logits_processors: tuple[type[LogitsProcessor], ...] = ()
    """Custom ones, in the order in which they run."""
    weights: WeightsIdentity = field(default_factory=WeightsIdentity, compare=False, repr=False)
    """What identifies the weights of the start, a drafter's included."""
    executor: str = "uni"
    """``uni``: one worker, in the engine's process; ``mp``: a process for each rank; ``ray``: an actor for each."""
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    """This engine's id for other engines, unless kv_transfer_config names it: the same in all of its processes."""

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache."""
        return KV_DTYPES.get(self.config.kv_cache_dtype, self.dtype)

    @property
    def output_rank(self) -> int:
        """The rank of a replica that reports sampled tokens: the first of the last pipeline stage; its ranks sample the
        same."""
        return self.config.replica_size - self.config.tensor_parallel_size

    @property
    def reply_ranks(self) -> range:
        """The ranks that reply to each step: all if there is a KV connector, from which each rank reports."""
        if self.connector is not None:
            return range(self.config.world_size)
        return range(self.output_rank, self.config.world_size, self.config.replica_size)

    @property
    def max_restarts(self) -> int:
        """Most restarts after errors, within an hour; 0: an error ends the engine."""
        return 0 if self.config.on_error == "raise" else self.config.max_restarts or MAX_RESTARTS

    @property
    def runner(self) -> str:
        """``v1`` or ``v2``."""
        return self.decision.runner

    @property
    def use_v2_model_runner(self) -> bool:
        return self.decision.runner == "v2"

    @property
    def compiles_kernels(self) -> bool:
        """Whether workers compile kernels before they serve."""
        return self.device == "cuda" and self.runner == "v2"

    @property
    def explicit(self) -> bool:
        """Whether the runner is the user's choice."""
        return self.decision.explicit

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why that runner, in sentences."""
        return self.decision.reasons

    @property
    def native_variant(self) -> str | None:
        """The instruction set of the C kernels, where some run; None there: the best one of the processor."""
        return self.machine.native_variant if "native" in self.kernels.names else None

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        """What is on and Model Runner V2 lacks."""
        return self.decision.unsupported

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an engine logs as warnings when it starts, each one line."""
        warnings, limit = self.decision.warnings, self.model.max_position_embeddings
        if self.device == "cpu" and self.machine.native_problem:
            warnings += (
                "The C kernels for CPUs cannot be used, and without them every step takes several times as long: "
                f"{self.machine.native_problem}.",
            )
        if self.config.max_model_len is None and self.max_model_len < limit:
            warnings += (
                f"There is no room for KV of the model's {limit:,} positions: requests are limited to "
                f"{self.max_model_len:,} tokens.",
            )
        asked, most = self.asked_max_num_seqs, self.config.max_num_seqs
        if asked is not None and most < asked:
            warnings += (f"There is no room for recurrent states of {asked:,} requests: {most:,} run at a time.",)
        return warnings


DUMMY_FORMAT = 1
"""Raised when `fleetfoot.weights.dummy` draws other values."""
_IRRELEVANT = ("dtype", "bos_token_id", "eos_token_ids", "tie_word_embeddings", "vocab_size")
"""Fields of a model's config that change no KV; the dtype that counts is the engine's own."""


def check_connector_settings(plan: EnginePlan) -> None:
    """Let the active connector check its settings, before anything is started.

    A connector that does not exist is reported by `Decision.check`. Raises ValueError or TypeError if the connector
    refuses its settings, or the class is not a connector.
    """
    if plan.connector is not None and plan.connector.layouts.exists:
        plan.connector.connector_class.check_settings(_context(plan, identity="", rank=0))


def transfer_context(plan: EnginePlan, *, rank: int = 0) -> TransferContext:
    """What one side of the plan's connector gets. ``rank``: of a worker, 0 .. world_size - 1; the scheduler's side
    has that of its data-parallel rank's first worker. For its connector a data-parallel rank is an engine."""
    return _context(plan, identity=partial(engine_fingerprint, plan), rank=rank)


def _context(plan: EnginePlan, *, identity: str | Callable[[], str], rank: int) -> TransferContext:
    assert plan.connector is not None
    config, engine = plan.connector.config, plan.config
    engine_id = config.engine_id or plan.engine_id
    if engine.num_data_ranks > 1:
        engine_id += f"-{rank // engine.replica_size}"
    of_stages = (plan.memory.stage(rank).bytes_per_block for rank in range(engine.pipeline_parallel_size))
    return TransferContext(
        config=config,
        block_size=engine.block_size,
        identity=identity,
        engine_id=engine_id,
        num_ranks=engine.replica_size,
        rank=rank % engine.replica_size,
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        bytes_per_block=sum(of_stages) * engine.tensor_parallel_size,
        groups=plan.memory.groups,
        dtype=plan.kv_dtype,
        engine=engine,
        model=plan.model,
        max_model_len=plan.max_model_len,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_blocks=plan.memory.num_blocks,
    )


def make_identity(
    config: EngineConfig,
    model_path: Path,
    drawn: Mapping[str, Any],
    drafter: Path | None = None,
    parts: Iterable[str] = (),
) -> WeightsIdentity:
    """What identifies an engine's weights. ``drawn``: what random ones depend on; ``drafter``: the folder of a model
    that drafts; ``parts``: folders within the checkpoint with further files."""
    if config.load_format == "dummy":
        text = json.dumps({**drawn, "seed": config.seed, "format": DUMMY_FORMAT}, sort_keys=True, default=str)
        return WeightsIdentity(drawn=text)
    files = (model_path / part / SINGLE_FILE for part in parts)
    return WeightsIdentity([model_path, *([] if drafter is None else [drafter])], files)


def engine_fingerprint(plan: EnginePlan, weights: str | None = None) -> str:
    """32 hex digits over all that KV depends on: the model, every byte of its weights, dtype, block size, and the
    layers of the whole engine, a drafter's included. ``weights``: identify those in use; None: those of the start.

    How the layers are spread over ranks is not in it, nor what device computes them.
    """
    config, drafter = plan.config, plan.drafter.model
    content: dict[str, Any] = {
        "model": {name: value for name, value in asdict(plan.model).items() if name not in _IRRELEVANT},
        "weights": plan.weights.value() if weights is None else weights,
        "quantization": config.quantization,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "block_size": config.block_size,
        "kv_layout": plan.kv_layout,
        "kv_groups": [[group.window, group.is_state] for group in plan.memory.groups],
    }
    if drafter is not None:
        layers = [msgspec.structs.asdict(spec) for spec in plan.drafter.kv_specs]
        content["drafter"] = {"method": drafter.method, "layers": layers}
    return digest_of([json.dumps(content, sort_keys=True, default=str)])
