"""Ranks on a Ray cluster of several nodes on this machine: the same tokens, whatever ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.ray_places import where
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for ranks, and three nodes with room for one each."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
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


ENDS = ("actor", "node", "head")


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
                cluster.head_node.kill_gcs_server()
            assert await asyncio.gather(*streams) == expected
            if end == "head":
                cluster.head_node.start_gcs_server()
            else:
                assert places != await llm.collective_rpc(where)
    finally:
        llm.shutdown()
