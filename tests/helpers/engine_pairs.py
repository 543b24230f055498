"""Engines in processes of their own for tests, and their clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.server.disaggregation.client import Engine, EngineProcess
from tests.helpers.prefill_decode import REQUESTS, ROOMY, nixl

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""On tensors this small, threads do nothing but wait for each other."""


def engine_settings(model: Path, role: str, *, runner: str, backend: str = "tcp", **settings: Any) -> dict[str, Any]:
    """The fields of an `EngineConfig`."""
    return {
        "model": str(model),
        "device": "cpu",
        "max_num_seqs": 8,
        "runner": runner,
        "kv_transfer_config": nixl(role, backend=backend),
        **ROOMY,
        **settings,
    }


def start(model: Path, role: str, **settings: Any) -> EngineProcess:
    return EngineProcess(engine_settings(model, role, **settings), environment=ONE_THREAD)


async def last_output(engine: Engine, prompt: PromptType, params: SamplingParams, request_id: str) -> RequestOutput:
    final = None
    async for output in engine.generate(prompt, params, request_id):
        final = output
    assert final is not None and final.finished
    return final


async def generate_all(engine: Engine, names: Iterable[str] = REQUESTS) -> dict[str, RequestOutput]:
    """Several of REQUESTS at once; their last outputs."""
    names = list(names)
    outputs = await asyncio.gather(*(last_output(engine, *REQUESTS[name], name) for name in names))
    return dict(zip(names, outputs, strict=True))


async def generate(engine: Engine, name: str) -> list[int]:
    """One of REQUESTS; its tokens."""
    return (await last_output(engine, *REQUESTS[name], name)).outputs[0].token_ids
