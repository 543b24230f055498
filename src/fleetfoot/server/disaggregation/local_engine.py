"""An `AsyncLLM` of this process as an `Engine`: what a server serves, and what a proxy can send requests to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from fleetfoot.async_llm import AsyncLLM
from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.prompts import PromptType
from fleetfoot.records.sampling_params import SamplingParams

_LOOK_SECONDS = 0.02
"""Between looks at an engine that is to be drained."""


class LocalEngine:
    """Implements `fleetfoot.server.disaggregation.engine.Engine`.

    Args:
        llm: the engine, which stays its owner's.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        return self._llm.generate(prompt, sampling_params, request_id, priority=priority)

    async def stats(self) -> dict[str, Any]:
        content: dict[str, Any] = msgspec.to_builtins(self._llm.stats())
        return content

    async def drain(self) -> dict[str, Any]:
        while not self._is_drained():
            await asyncio.sleep(_LOOK_SECONDS)
        await self._llm.check_integrity()
        return await self.stats()

    def _is_drained(self) -> bool:
        scheduler, transfers = self._llm.stats().scheduler, self._llm.stats().transfers
        return not (
            scheduler.num_running or scheduler.num_waiting or transfers.num_loading or transfers.num_lent_blocks
        )
