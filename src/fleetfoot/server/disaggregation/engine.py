"""What a proxy needs of an engine, and what a server makes reachable."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.prompts import PromptType
from fleetfoot.records.sampling_params import SamplingParams


class Engine(Protocol):
    """An engine here (`fleetfoot.server.disaggregation.local_engine.LocalEngine`), one in another process
    (`fleetfoot.server.disaggregation.engine_client.EngineClient`), or two as one
    (`fleetfoot.server.disaggregation.proxy.DisaggregatedLLM`)."""

    def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `fleetfoot.AsyncLLM.generate`; leaving it early aborts the request."""
        ...

    async def stats(self) -> dict[str, Any]:
        """`fleetfoot.engine.stats.EngineStats` as plain data; a proxy has its own."""
        ...

    async def drain(self) -> dict[str, Any]:
        """Wait until no request is under way and no KV is lent; the statistics.

        Raises:
            RuntimeError: the engine's books do not add up.
        """
        ...
