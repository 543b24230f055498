"""The plan: everything about an engine that follows from its settings, the model and the machine, decided once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import ModelConfig
from fleetfoot.plan.graphs import CaptureTable


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Immutable; everything that depends on a choice reads it here."""

    config: EngineConfig
    model: ModelConfig
    model_path: Path
    tokenizer_path: Path | None
    """None: token ids alone."""
    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    runner: str
    """``v1`` or ``v2``."""
    reasons: tuple[str, ...]
    """Why that runner, in sentences."""
    max_model_len: int
    max_num_batched_tokens: int
    async_scheduling: bool
    """Whether step N+1 is scheduled before the tokens of step N are known."""
    capture_table: CaptureTable
    """The batch shapes that are captured as graphs."""
