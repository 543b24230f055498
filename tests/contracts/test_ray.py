"""Ranks on a Ray cluster of several nodes on this machine: the same tokens, whatever ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.ray_places import where
from tests.helpers.routers import free_ports
from tests.helpers.server import RunningServer
from tests.helpers.streams import async_test

from fleetfoot import LLM, AsyncLLM, SamplingParams
from fleetfoot.engine.arg_utils import AsyncEngineArgs

pytestmark = [pytest.mark.contracts, pytest.mark.filterwarnings("default")]  # Ray's own warnings are no failures

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "kv_cache_memory_bytes": 1 << 26, "distributed_executor_backend": "ray", "trusted_network": True
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [f"Once upon a time there were {number} birds" for number in range(64)]


REDIS = shutil.which("redis-server")
"""With it the cluster survives the restart of its head."""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Redis; empty: there is none here."""
    if REDIS is None:
        yield ""
        return
    address = f"127.0.0.1:{free_ports(1)[0]}"
    words = [REDIS, "--port", address.rpartition(":")[2], "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(words, cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.PIPE)
    assert process.stdout is not None
    next(line for line in process.stdout if b"Ready to accept" in line)
    yield address
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def cluster(redis: str) -> Iterator[Any]:
    """A head without room for ranks, and three nodes with room for one each."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        if redis:
            patch.setenv("RAY_REDIS_ADDRESS", redis)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", made.address)
        for _ in range(3):
            made.add_node(num_cpus=1)
        made.wait_for_nodes()
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of one rank in this process."""
    with LLM(**SETTINGS | {"distributed_executor_backend": "uni"}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


async def tokens_of(llm: AsyncLLM, begun: asyncio.Event, number: int) -> list[int]:
    found: list[int] = []
    async for output in llm.generate(PROMPTS[number], PARAMS, str(number)):
        found = output.outputs[0].token_ids
        if len(found) > 3:
            begun.set()
    return found


def test_replicas_have_their_ranks_on_the_cluster(cluster: Any, expected: list[list[int]]) -> None:
    """A request for each, and streams of both at once."""
    flags = "--dtype", "float32", "--data-parallel-size", "2", "--executor", "ray", "--trusted-network"
    with RunningServer(*flags, "--kv-cache-memory-bytes", str(1 << 26), is_forked=False) as server:
        assert num_groups() == 2
        body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}

        def tokens(number: int) -> list[int]:
            headers = {"X-data-parallel-rank": str(number % 2)}
            given = {**body, "prompt": PROMPTS[number]}
            answer = httpx.post(f"{server.url}/v1/completions", json=given, headers=headers, timeout=120).json()
            return list(answer["choices"][0]["token_ids"])

        with ThreadPoolExecutor(16) as threads:
            assert [*threads.map(tokens, range(16))] == expected[:16]
        assert server.stop() == 0
    assert num_groups() == 0


def num_groups() -> int:
    """Placement groups of engines."""
    import ray
    from ray.util import placement_group_table

    if not ray.is_initialized():
        ray.init(address="auto")
    return sum(one["state"] == "CREATED" for one in placement_group_table().values())


ENDS = ("head", "actor", "node") if REDIS else ("actor", "node", "head")
"""After the head's restart the cluster is known only with a Redis."""


@async_test
async def test_64_streams_have_the_tokens_of_one_rank_whatever_ends(cluster: Any, expected: list[list[int]]) -> None:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS, tensor_parallel_size=2, on_error="restart"))
    try:
        for end in ENDS:
            places = await llm.collective_rpc(where)
            assert len({node for _, node in places}) == 2
            begun = asyncio.Event()
            streams = [asyncio.ensure_future(tokens_of(llm, begun, number)) for number in range(64)]
            await begun.wait()
            if end == "actor":
                os.kill(places[1][0], signal.SIGKILL)
            elif end == "node":
                node = next(one for one in cluster.worker_nodes if one.node_id == places[0][1])
                await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            else:
                cluster.head_node.kill_gcs_server(check_alive=False)
            assert await asyncio.gather(*streams) == expected
            if end == "head":
                cluster.head_node.start_gcs_server()
            else:
                assert places != await llm.collective_rpc(where)
    finally:
        llm.shutdown()
