"""Requests that are prefilled on one engine and decoded on another, and engines for both."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetfoot import LLMEngine, SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.child_process import EngineProcess
from fleetfoot.engine.client import EngineClient
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.server.api_server import connected
from fleetfoot.server.engine_group import EngineGroup
from tests.helpers.engines import TEXT_MODEL, prompt_of, run_requests

VOCAB = TEXT_MODEL["vocab_size"]
SHARED_PROMPT = prompt_of(21, VOCAB, seed=1)
PROMPTS = {
    "alone": prompt_of(18, VOCAB, seed=2),
    "one": [*SHARED_PROMPT, *prompt_of(9, VOCAB, seed=3)],
    "two": [*SHARED_PROMPT, *prompt_of(6, VOCAB, seed=4)],
    "tiny": prompt_of(3, VOCAB, seed=5),
    "long": prompt_of(40, VOCAB, seed=6),
}
PARAMS = {
    "alone": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "one": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2),
    "two": SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True, repetition_penalty=1.3),
    "tiny": SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    "long": SamplingParams(temperature=0.7, seed=8, max_tokens=14, ignore_eos=True, logprobs=3),
}
REQUESTS = {name: (PROMPTS[name], PARAMS[name]) for name in PROMPTS}
SIZE: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 24}
"""Room for 96 tokens: less than the requests need together, so some are preempted, and blocks are evicted."""
ROOMY: dict[str, Any] = {**SIZE, "num_gpu_blocks_override": 100}

Tokens = dict[str, list[int]]


def nixl(role: str, *, backend: str = "tcp", **fields: Any) -> dict[str, Any]:
    """A kv_transfer_config."""
    extra = {"kv_connector_extra_config": {"backend": backend}}
    return {"kv_connector": "NixlConnector", "kv_role": role, **extra, **fields}


def tokens_of(outputs: dict[str, RequestOutput]) -> Tokens:
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


def prefilled(engine: LLMEngine, names: list[str] | None = None) -> dict[str, Any]:
    """Compute prompts; returns their KV transfer parameters. The KV is held from now on."""
    params = SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    outputs = run_requests(engine, {name: (PROMPTS[name], params) for name in names or PROMPTS})
    engine.step()  # reports the last of them to the workers
    return {name: output.kv_transfer_params for name, output in outputs.items()}


def decodes(held: dict[str, Any]) -> dict[str, tuple[Any, SamplingParams]]:
    """Requests that go on from there."""
    return {
        name: (PROMPTS[name], replace(PARAMS[name], extra_args={"kv_transfer_params": params} if params else None))
        for name, params in held.items()
    }


def settle(engine: LLMEngine) -> dict[str, int]:
    """Step until nothing is held or loaded and every block is free; returns the counters."""
    steps = 0
    while engine.has_transfers():
        engine.step()
        engine.check_integrity()
        steps += 1
        assert steps < 10_000, "transfers never end"
    assert engine.core.scheduler.pools.num_used == 0
    engine.core.scheduler.check_idle()
    return engine.stats().transfers.counters


def engine_settings(
    model: Path, role: str, *, model_runner: str, backend: str = "tcp", **settings: Any
) -> dict[str, Any]:
    """The fields of an `EngineConfig`."""
    return {
        "model": str(model),
        "device": "cpu",
        "max_num_seqs": 8,
        "model_runner": model_runner,
        "kv_transfer_config": nixl(role, backend=backend),
        **ROOMY,
        **settings,
    }


def start(model: Path, role: str, **settings: Any) -> EngineProcess:
    """An engine in a process of its own."""
    return EngineProcess(EngineConfig(**engine_settings(model, role, **settings)), logging.WARNING)


def kill(process: EngineProcess) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert process.stop() == -signal.SIGKILL


@asynccontextmanager
async def client_of(engine: EngineProcess | EngineGroup) -> AsyncIterator[EngineClient]:
    client = connected(engine.address if isinstance(engine, EngineProcess) else engine)
    try:
        await client.start()
        yield client
    finally:
        client.close()


async def last_output(
    engine: EngineClient, prompt: PromptType, params: SamplingParams, request_id: str
) -> RequestOutput:
    final = None
    async for output in engine.generate(prompt, params, request_id):
        final = output
    assert final is not None and final.finished
    return final


async def generate_all(engine: EngineClient, names: Iterable[str] = REQUESTS) -> dict[str, RequestOutput]:
    """Several of REQUESTS at once; their last outputs."""
    names = list(names)
    outputs = await asyncio.gather(*(last_output(engine, *REQUESTS[name], name) for name in names))
    return dict(zip(names, outputs, strict=True))


async def generate(engine: EngineClient, name: str) -> list[int]:
    """One of REQUESTS; its tokens."""
    return (await last_output(engine, *REQUESTS[name], name)).outputs[0].token_ids
