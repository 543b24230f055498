"""Two engines in processes of their own and a proxy: together they give the outputs of one engine."""

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.kv_pair import skip_without
from tests.helpers.prefill_decode import PARAMS, PROMPTS, SIZE, generate, generate_all, last_output, start
from tests.helpers.streams import async_test

from fleetfoot import SamplingParams
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind
from fleetfoot.server.disaggregation.client import EngineClient
from fleetfoot.server.disaggregation.proxy import DisaggregatedLLM, ProxyStats
from fleetfoot.server.disaggregation.serve import EngineServer, reserve

Outputs = dict[str, RequestOutput]


@dataclass
class Pair:
    prefill: EngineClient
    decode: EngineClient

    def proxy(self) -> DisaggregatedLLM:
        return DisaggregatedLLM(self.prefill, self.decode)

    async def settled(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Wait until nothing runs or is held; returns the transfers of both since their start."""
        transfers = []
        for engine in (self.prefill, self.decode):
            scheduler = (await engine.drain())["scheduler"]
            assert scheduler["kv_cache_usage"] == 0  # blocks of the prefix cache are not in use
            assert scheduler["transfers"]["num_loading"] == scheduler["transfers"]["num_held_blocks"] == 0
            transfers.append(scheduler["transfers"])
        return transfers[0], transfers[1]


@pytest.fixture(scope="module", params=["v1-tcp", "v2-tcp", "v2-nixl"])
def pair(request: pytest.FixtureRequest, text_model: Path) -> Iterator[Pair]:
    """A prefill engine with room, and a decode engine that has to preempt."""
    runner, backend = request.param.split("-")
    skip_without(backend)
    with (
        start(text_model, "kv_producer", model_runner=runner, backend=backend) as prefill,
        start(text_model, "kv_consumer", model_runner=runner, backend=backend, **SIZE) as decode,
    ):
        yield Pair(EngineClient(prefill.wait_until_ready()), EngineClient(decode.wait_until_ready()))
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
    """Greedy and seeded, with penalties and logprobs, through a proxy behind a port."""
    proxy = pair.proxy()
    server = EngineServer(proxy)
    await server.start(reserve())
    client = EngineClient(server.address)
    for name, output in (await generate_all(client)).items():
        assert_same(output, expected[name])
    assert proxy.counts == ProxyStats(num_requests=5, num_prefilled=4)
    sent, loaded = await pair.settled()
    assert await client.drain() == await client.stats() == asdict(proxy.counts)
    await server.close()
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
    proxy = pair.proxy()
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, output_kind=RequestOutputKind.DELTA)
    prompt = "Once upon a time there was a little house in the woods, and in it lived"
    alone = await last_output(pair.decode, prompt, replace(params, output_kind=RequestOutputKind.CUMULATIVE), "alone")
    pieces = [output.outputs[0] async for output in proxy.generate(prompt, params, "r")]
    assert "".join(piece.text for piece in pieces) == alone.outputs[0].text
    assert [token for piece in pieces for token in piece.token_ids] == alone.outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = proxy.generate(PROMPTS["long"], params, "leaves")
    assert not (await anext(outputs)).finished
    await outputs.aclose()
    early = asyncio.ensure_future(last_output(proxy, PROMPTS["alone"], params, "leaves early"))
    await asyncio.sleep(0)  # it has begun
    early.cancel()
    with pytest.raises(asyncio.CancelledError):
        await early
    assert await generate(proxy, "two") == expected["two"].outputs[0].token_ids
    await pair.settled()


@async_test
async def test_requests_without_prefill(pair: Pair, expected: Outputs) -> None:
    """With several sequences or prompt logprobs, they are computed on the decode engine alone."""
    proxy = pair.proxy()
    params = replace(PARAMS["long"], n=2)
    several = await last_output(proxy, PROMPTS["long"], params, "n")
    alone = await last_output(pair.decode, PROMPTS["long"], params, "alone")
    assert [entry.token_ids for entry in several.outputs] == [entry.token_ids for entry in alone.outputs]
    assert len(several.outputs) == 2
    with_logprobs = await last_output(proxy, PROMPTS["one"], replace(PARAMS["one"], prompt_logprobs=1), "p")
    assert with_logprobs.outputs[0].token_ids == expected["one"].outputs[0].token_ids
    assert with_logprobs.prompt_logprobs is not None and len(with_logprobs.prompt_logprobs) == 30
    assert proxy.counts == ProxyStats(num_requests=2)
    await pair.settled()


@async_test
async def test_invalid_requests(pair: Pair, expected: Outputs) -> None:
    """The decode engine reports the error; other requests go on."""
    proxy = pair.proxy()
    good = asyncio.ensure_future(generate(proxy, "long"))
    with pytest.raises(ValueError, match="prompt"):
        await last_output(proxy, [], PARAMS["alone"], "empty")
    with pytest.raises(ValueError, match="300 tokens"):
        await last_output(proxy, [7] * 300, SamplingParams(), "too long")
    with pytest.raises(ValueError, match="do_remote_decode is true, but kv_role is 'kv_consumer'"):
        wrong = SamplingParams(extra_args={"kv_transfer_params": {"do_remote_decode": True}})
        await last_output(pair.decode, PROMPTS["long"], wrong, "wrong")
    assert await good == expected["long"].outputs[0].token_ids
    await pair.settled()


@async_test
async def test_equal_request_ids_one_after_the_other(pair: Pair, expected: Outputs) -> None:
    """The prefill engine may still hold KV of a request of that id."""
    proxy = pair.proxy()
    for _ in range(3):
        assert await generate(proxy, "one") == expected["one"].outputs[0].token_ids
    assert proxy.counts == ProxyStats(num_requests=3, num_prefilled=3)
    await pair.settled()
