"""Two engines in processes of their own and a group of them: together they give the outputs of one engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.kv_pair import skip_without
from tests.helpers.prefill_decode import PARAMS, PROMPTS, SIZE, client_of, generate, generate_all, last_output, start
from tests.helpers.streams import async_test

from fleetfoot import SamplingParams
from fleetfoot.engine.child_process import EngineProcess
from fleetfoot.engine.client import EngineClient
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind
from fleetfoot.server.engine_group import EngineGroup, GroupLink

Outputs = dict[str, RequestOutput]


@dataclass
class Clients:
    """Of the two engines, and of both as one."""

    prefill: EngineClient
    decode: EngineClient
    proxy: EngineClient

    async def settled(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Wait until nothing runs or is held; returns the transfers of both since their start."""
        transfers = []
        for engine in (self.prefill, self.decode):
            scheduler = (await engine.call("drain"))["scheduler"]
            assert scheduler["kv_cache_usage"] == 0  # blocks of the prefix cache are not in use
            assert scheduler["transfers"]["num_loading"] == scheduler["transfers"]["num_held_blocks"] == 0
            transfers.append(scheduler["transfers"])
        return transfers[0], transfers[1]

    async def counts(self) -> tuple[int, int, int]:
        """Prefills, failed ones, and resumed requests."""
        counters = (await self.proxy.call("metrics"))[-1]["counters"]
        return tuple(counters.values())


@dataclass
class Pair:
    prefill: EngineProcess
    decode: EngineProcess

    @asynccontextmanager
    async def clients(self, prefill: EngineProcess | None = None) -> AsyncIterator[Clients]:
        """``prefill``: another engine of the group."""
        group = EngineGroup(((prefill or self.prefill).address,), (self.decode.address,))
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(client_of(one)) for one in (self.prefill, self.decode, group)]
            yield Clients(*engines)


@pytest.fixture(scope="module", params=["v1-tcp", "v2-tcp", "v2-nixl"])
def pair(request: pytest.FixtureRequest, text_model: Path) -> Iterator[Pair]:
    """A prefill engine with room, and a decode engine that has to preempt."""
    runner, backend = request.param.split("-")
    skip_without(backend)
    shared = {"model_runner": runner, "backend": backend, "max_model_len": 96}  # what the smaller cache has room for
    prefill = start(text_model, "kv_producer", **shared)
    decode = start(text_model, "kv_consumer", **shared, **SIZE)
    yield Pair(prefill, decode)
    assert (prefill.stop(), decode.stop()) == (0, 0)


def assert_same(output: RequestOutput, other: RequestOutput) -> None:
    """Tokens, text, and logprobs but for rounding: prompts are not always cut into steps at the same places."""
    ours, theirs = output.outputs[0], other.outputs[0]
    assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
    assert (ours.logprobs is None) == (theirs.logprobs is None)
    for mine, others in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
        assert mine.keys() == others.keys()
        for token, entry in mine.items():
            assert entry.logprob == pytest.approx(others[token].logprob, abs=1e-4)
            assert (entry.rank, entry.decoded_token) == (others[token].rank, others[token].decoded_token)


@async_test
async def test_several_requests_at_once(pair: Pair, expected: Outputs) -> None:
    """Greedy and seeded, with penalties and logprobs."""
    async with pair.clients() as clients:
        for name, output in (await generate_all(clients.proxy)).items():
            assert_same(output, expected[name])
        assert await clients.counts() == (4, 0, 0)
        sent, loaded = await clients.settled()
    # a request with a prefix that another one has loaded meanwhile reads less, or nothing
    assert 3 <= loaded["loads_done"] <= 4 and loaded["loads_failed"] == 0
    counters = sent["counters"]
    assert counters["sends_sent"] == loaded["loads_done"]
    assert counters["sends_sent"] + counters.get("sends_declined", 0) == 4
    assert loaded["tokens_loaded"] == 4 * loaded["counters"]["blocks_loaded"]
    assert loaded["counters"]["bytes_loaded"] == 2048 * loaded["counters"]["blocks_loaded"]


@async_test
async def test_streams(pair: Pair, expected: Outputs) -> None:
    """Read to their end, left in the middle, and left while the prompt is computed."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, output_kind=RequestOutputKind.DELTA)
    prompt = "Once upon a time there was a little house in the woods, and in it lived"
    async with pair.clients() as clients:
        whole = replace(params, output_kind=RequestOutputKind.CUMULATIVE)
        alone = await last_output(clients.decode, prompt, whole, "alone")
        pieces = [output.outputs[0] async for output in clients.proxy.generate(prompt, params, "r")]
        assert "".join(piece.text for piece in pieces) == alone.outputs[0].text
        assert [token for piece in pieces for token in piece.token_ids] == alone.outputs[0].token_ids
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = clients.proxy.generate(PROMPTS["long"], params, "leaves")
        assert not (await anext(outputs)).finished
        await outputs.aclose()
        early = asyncio.ensure_future(last_output(clients.proxy, PROMPTS["alone"], params, "leaves early"))
        await asyncio.sleep(0)  # it has begun
        early.cancel()
        with pytest.raises(asyncio.CancelledError):
            await early
        assert await generate(clients.proxy, "two") == expected["two"].outputs[0].token_ids
        await clients.settled()


@async_test
async def test_invalid_requests(pair: Pair, expected: Outputs) -> None:
    """The error is reported; other requests go on."""
    async with pair.clients() as clients:
        good = asyncio.ensure_future(generate(clients.proxy, "long"))
        with pytest.raises(ValueError, match="prompt"):
            await last_output(clients.proxy, [], PARAMS["alone"], "empty")
        with pytest.raises(ValueError, match="300 tokens"):
            await last_output(clients.proxy, [7] * 300, SamplingParams(), "too long")
        wrong = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_decode": True}})
        for client in (clients.decode, clients.proxy):
            with pytest.raises(ValueError, match="do_remote_decode is true, but kv_role is 'kv_consumer'"):
                await last_output(client, PROMPTS["long"], wrong, "wrong")
        with pytest.raises(ValueError, match="update_weights is not supported through a proxy"):
            await clients.proxy.call("update_weights", {})
        assert await good == expected["long"].outputs[0].token_ids
        await clients.settled()


@async_test
async def test_equal_request_ids_one_after_the_other(pair: Pair, expected: Outputs) -> None:
    """The prefill engine may still hold KV of a request of that id."""
    async with pair.clients() as clients:
        for _ in range(3):
            assert await generate(clients.proxy, "one") == expected["one"].outputs[0].token_ids
        assert await clients.counts() == (3, 0, 0)
        await clients.settled()


@async_test
async def test_requests_of_a_client_that_is_gone_are_aborted(pair: Pair) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async with client_of(pair.decode) as stays:
        before = (await stays.call("drain"))["num_finished"].get("abort", 0)
        async with client_of(pair.decode) as leaves:
            stream = await leaves.submit(PROMPTS["long"], params, "r")
            await anext(stream)
            await stays.call("pause_generation", mode="keep")
        await stays.call("resume_generation")
        assert (await stays.call("drain"))["num_finished"]["abort"] == before + 1


@async_test
async def test_a_prefill_engine_with_another_role(pair: Pair) -> None:
    with pytest.raises(ValueError, match="never hands over KV: its kv_connector is 'NixlConnector', and its role"):
        async with pair.clients(prefill=pair.decode):
            pass


@async_test
async def test_a_client_that_leaves_between_prefill_and_decode(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill engine releases the blocks at once."""
    prefilled = asyncio.Event()
    find: Callable[..., Any] = GroupLink._generating_engine
    async with pair.clients() as clients:
        before, _ = await clients.settled()
        monkeypatch.setattr(GroupLink, "_generating_engine", lambda *_: prefilled.set())
        request = asyncio.ensure_future(generate(clients.proxy, "long"))
        await prefilled.wait()
        assert (await clients.prefill.call("stats"))["scheduler"]["transfers"]["num_held_blocks"] == 10
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        monkeypatch.setattr(GroupLink, "_generating_engine", find)
        sent, _ = await clients.settled()
        assert sent["counters"]["sends_evicted"] == before["counters"].get("sends_evicted", 0) + 1
