"""Sends each request to a prefill engine, and then, with its KV transfer parameters, to a decode engine. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, replace
from typing import Any

from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.server.disaggregation.client import Engine, release

logger = logging.getLogger(__name__)

KV_TRANSFER_PARAMS = "kv_transfer_params"
DEFAULT_PREFILL_SECONDS = 60.0


@dataclass(slots=True)
class ProxyStats:
    """Counts of requests since the start."""

    num_requests: int = 0
    num_prefilled: int = 0
    """The prefill engine has computed their KV and holds it for the decode engine."""
    num_prefills_failed: int = 0
    """Computed by the decode engine alone: the prefill engine was unreachable, timed out, or refused."""


class DisaggregatedLLM:
    """A prefill and a decode engine with the same model; implements `fleetfoot.server.disaggregation.client.Engine`.

    Outputs are those of the decode engine. If prefill fails, the decode engine computes the prompt itself.

    Args:
        prefill: with role ``kv_producer`` or ``kv_both``.
        decode: with role ``kv_consumer`` or ``kv_both``.
        prefill_timeout: seconds to wait for the prefill engine.
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
        transfer = await self.prefill(prompt, sampling_params, request_id, priority=priority)
        try:
            if transfer is not None:
                sampling_params = replace(sampling_params, extra_args={KV_TRANSFER_PARAMS: transfer})
            outputs = self._decode.generate(prompt, sampling_params, request_id, priority=priority)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    transfer = None  # the decode engine has loaded the KV
                    yield output
        finally:  # the decode engine is dead or has refused the request, or the client has disconnected
            await release(transfer)

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
        """Compute the prompt's KV; returns the ``kv_transfer_params`` with which a decode engine loads it, or None.

        Requests with several sequences or prompt logprobs are skipped: their KV cannot be loaded.
        """
        if sampling_params.n > 1 or sampling_params.prompt_logprobs is not None:
            return None
        params = SamplingParams(  # one token, which is discarded
            temperature=0,
            max_tokens=1,
            detokenize=False,
            truncate_prompt_tokens=sampling_params.truncate_prompt_tokens,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={KV_TRANSFER_PARAMS: {"do_remote_decode": True}},
        )
        transfer = None
        try:
            # KV may be held for longer than the request lasts, and the id may be used again
            prefill_id = f"{request_id}-{secrets.token_hex(4)}"
            outputs = self._prefill.generate(prompt, params, prefill_id, priority=priority)
            async with asyncio.timeout(self._prefill_timeout), contextlib.aclosing(outputs):
                async for output in outputs:
                    transfer = output.kv_transfer_params
                    completion = output.outputs[0]
                    if completion.finish_reason == "error":
                        raise RuntimeError(f"the prefill engine failed: {completion.stop_reason}")
        except Exception as error:  # the decode engine reports invalid requests
            await release(transfer)
            self.counts.num_prefills_failed += 1
            reason = str(error) or f"it took longer than {self._prefill_timeout:g} s"
            logger.warning("request %r goes without prefill: %s", request_id, reason)
            return None
        except BaseException:  # the client has disconnected
            await release(transfer)
            raise
        self.counts.num_prefilled += transfer is not None
        return transfer
