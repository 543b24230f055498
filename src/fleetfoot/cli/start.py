"""An engine for the length of a command."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import engine_config
from fleetfoot.cli.command import usage_errors

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.plan.plan import EnginePlan
    from fleetfoot.records.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class StartedEngine:
    engine: LLMEngine
    plan: EnginePlan
    layout: KVLayout
    start_s: float
    """Seconds from the first import to an engine that takes requests."""

    @property
    def max_tokens_in_all(self) -> int:
        """Most tokens of prompt and output that a request can have, by the model's length and by the KV cache."""
        return min(self.engine.admission.max_model_len, self.layout.num_blocks * self.layout.block_size)


@contextmanager
def started_engine(arguments: argparse.Namespace, **defaults: Any) -> Iterator[StartedEngine]:
    """Load the engine that the flags describe, and give everything back at the end.

    Args:
        defaults: settings for what the user did not give.

    Raises:
        UsageError: settings, model and machine do not fit together.
    """
    begin = time.perf_counter()
    with usage_errors():
        config = engine_config(arguments, **defaults)  # a wrong value is refused before torch is imported

        from fleetfoot.engine.build import build_parts
        from fleetfoot.engine.engine import LLMEngine

        parts = build_parts(config)
    engine = LLMEngine(parts.core, parts.admission, parts.tokenizer, plan=parts.plan)
    try:
        yield StartedEngine(engine, parts.plan, parts.layout, time.perf_counter() - begin)
    finally:
        engine.shutdown()
