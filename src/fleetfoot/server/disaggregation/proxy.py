"""Sends each request to a prefill engine, and then, with what that says of its KV, to a decode engine. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, replace
from typing import Any

from fleetfoot.kv_transfer.nixl.params import parse_params
from fleetfoot.kv_transfer.nixl.side_channel import decline
from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.prompts import PromptType
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.server.disaggregation.engine import Engine

logger = logging.getLogger(__name__)

KV_TRANSFER_PARAMS = "kv_transfer_params"
DEFAULT_PREFILL_SECONDS = 60.0


@dataclass(slots=True)
class ProxyStats:
    """Requests since the start."""

    num_requests: int = 0
    num_prefilled: int = 0
    """Whose KV the prefill engine lent."""
    num_prefills_failed: int = 0
    """That the decode engine computed alone, because the prefill engine was dead, too slow, or refused."""


class DisaggregatedLLM:
    """Two engines with the same model as one; implements `fleetfoot.server.disaggregation.engine.Engine`.

    Output is that of the decode engine. What the other computes can make it faster, and never other than it would be:
    where prefill fails, the decode engine computes the prompt itself.

    Args:
        prefill: with role ``kv_producer`` or ``kv_both``.
        decode: with role ``kv_consumer`` or ``kv_both``.
        prefill_timeout: seconds after which the prefill engine is not waited for any longer.
    """

    def __init__(self, prefill: Engine, decode: Engine, *, prefill_timeout: float = DEFAULT_PREFILL_SECONDS) -> None:
        self._prefill = prefill
        self._decode = decode
        self._prefill_timeout = prefill_timeout
        self.counts = ProxyStats()

    async def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `fleetfoot.AsyncLLM.generate`.

        Raises:
            ValueError, TypeError, EngineDeadError, EngineUnreachableError: from the decode engine.
        """
        self.counts.num_requests += 1
        lent = await self.prefill(prompt, sampling_params, request_id, priority=priority)
        if lent is not None:
            sampling_params = replace(sampling_params, extra_args={KV_TRANSFER_PARAMS: lent})
        outputs = self._decode.generate(prompt, sampling_params, request_id, priority=priority)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    lent = None  # it has been taken
                    yield output
        finally:  # else the decode engine is dead, or refuses the request, or the client has left
            if lent is not None and (remote := parse_params(lent)) is not None:
                loop = asyncio.get_running_loop()
                loop.run_in_executor(None, decline, remote.remote_addresses, remote.remote_lease)

    async def stats(self) -> dict[str, Any]:
        """`ProxyStats`."""
        return asdict(self.counts)

    async def drain(self) -> dict[str, Any]:
        for engine in (self._decode, self._prefill):
            await engine.drain()
        return await self.stats()

    async def prefill(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> dict[str, Any] | None:
        """The first half: where the prompt's KV can be had, as ``kv_transfer_params`` for a decode engine; or None.

        Only what can be loaded is computed: requests for several sequences, or for the prompt's logprobs, are not.
        """
        if sampling_params.n > 1 or sampling_params.prompt_logprobs is not None:
            return None
        try:
            async with asyncio.timeout(self._prefill_timeout):
                lent = await self._lent(prompt, prefill_params(sampling_params), request_id, priority)
        except Exception as error:  # the decode engine says what is wrong with a request, if that is it
            self.counts.num_prefills_failed += 1
            reason = str(error) or f"it took longer than {self._prefill_timeout:g} s"
            logger.warning("request %r goes without prefill: %s", request_id, reason)
            return None
        self.counts.num_prefilled += lent is not None
        return lent

    async def _lent(
        self, prompt: PromptType, params: SamplingParams, request_id: str, priority: int
    ) -> dict[str, Any] | None:
        # KV may stay lent for longer than the request lasts, and the next may have the same id
        outputs = self._prefill.generate(prompt, params, f"{request_id}-{secrets.token_hex(4)}", priority=priority)
        lent = None
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                lent = output.kv_transfer_params
                completion = output.outputs[0]
                if completion.finish_reason == "error":
                    raise RuntimeError(f"the prefill engine failed: {completion.stop_reason}")
        return lent


def prefill_params(params: SamplingParams) -> SamplingParams:
    """A request for the prompt's KV alone: one token, which nobody looks at."""
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        detokenize=False,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={KV_TRANSFER_PARAMS: {"do_remote_decode": True}},
    )
