"""Drafts, KV connectors and parallelism in worker processes: the tokens are those of one process.

Every two of these meet on either runner.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import pids_of, running
from tests.helpers.engines import run_requests
from tests.helpers.faulty_connector import OFFLOADING, connector, faulty
from tests.helpers.prefill_decode import REQUESTS, ROOMY, SIZE, Tokens, decodes, nixl, prefilled, settle, tokens_of
from tests.helpers.runner_lives import DRAFT
from tests.helpers.schedules import Life, assert_lives_agree, live_alone, random_lives

from fleetfoot.engine.engine import LLMEngine
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import SamplingParams

SEEDS = (6, 9)
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 24}
"""Prompts come in chunks, requests are preempted, blocks are evicted, rows change hands."""

METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "draft": {"method": "draft_model", "num_speculative_tokens": 2, "model": str(DRAFT)},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
}
WAYS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
CASES = [
    ("ngram", "none", "tensor", "v1"),
    ("ngram", "files", "pipeline", "v1"),
    ("ngram", "host", "tensor", "v2"),
    ("draft", "none", "pipeline", "v1"),
    ("draft", "files", "tensor", "v2"),
    ("draft", "host", "pipeline", "v2"),
    ("eagle", "none", "tensor", "v2"),
    ("eagle", "files", "pipeline", "v2"),
    ("eagle", "host", "tensor", "v1"),
    ("eagle", "host", "both", "v2"),
]
WITHOUT_DRAFTS = [("none", "none", "tensor", "v1"), ("none", "none", "pipeline", "v2"), ("none", "none", "both", "v2")]
Expected = dict[int, dict[str, RequestOutput]]


def files(folder: Path) -> dict[str, Any]:
    return connector("SharedStorageConnector", shared_storage_path=str(folder))


def lives_of(seed: int) -> list[Life]:
    """One of them repeats itself, which n-grams can foresee."""
    lives = random_lives(seed, 2048)
    lives[0].prompt[:] = [40, 50, 60, 40, 50, 60, 40, 50]
    return lives


@pytest.fixture(scope="module")
def expected() -> Expected:
    with running(runner="v1", enable_prefix_caching=False, max_num_seqs=1) as engine:
        return {seed: live_alone(engine, lives_of(seed)) for seed in SEEDS}


def check(engine: LLMEngine, expected: Expected, seeds: Iterable[int] = SEEDS) -> None:
    for seed in seeds:
        assert_lives_agree(engine, lives_of(seed), expected[seed], f"seed {seed}", tolerance=1e-4)


def test_every_pair_is_there() -> None:
    for first in range(4):
        for second in range(first):
            names = [{case[place] for case in CASES if case[2] != "both"} for place in (first, second)]
            pairs = {(case[first], case[second]) for case in CASES}
            assert {(one, other) for one in names[0] for other in names[1]} <= pairs


@pytest.mark.parametrize("case", [*WITHOUT_DRAFTS, *CASES], ids=", ".join)
def test_outputs_are_those_of_one_process(case: tuple[str, str, str, str], tmp_path: Path, expected: Expected) -> None:
    method, store, way, runner = case
    settings = {"runner": runner, **TIGHT, **WAYS[way]}
    if METHODS[method]:
        settings["speculative_config"] = {**METHODS[method], "adaptive": False}
    if store != "none":
        settings["kv_transfer_config"] = OFFLOADING if store == "host" else files(tmp_path)
    if store == "files":  # what one engine saves, another one loads
        with running(**settings) as engine:
            check(engine, expected, SEEDS[:1])
    with running(**settings) as engine:
        assert engine.runner_name == runner
        assert len(pids_of(engine)) == (4 if way == "both" else 2)
        check(engine, expected)
        if store == "host":  # a second time: what was evicted since the first comes back
            check(engine, expected)
        stats = engine.stats()
    drafts, transfers = stats.drafts, stats.transfers
    assert stats.scheduler.num_preemptions > 0
    assert 0 < drafts.num_accepted < drafts.num_drafted or method == "none"
    assert (transfers.loads_failed, transfers.loads_started) == (0, transfers.loads_done)
    assert (transfers.tokens_loaded > 0) == (store != "none")


@pytest.mark.parametrize(("way", "runner"), [("tensor", "v2"), ("pipeline", "v1")])
def test_with_room_for_all_requests(way: str, runner: str, expected: Expected) -> None:
    settings = {"num_gpu_blocks_override": 256, "max_num_batched_tokens": 512, "max_num_seqs": 256, **WAYS[way]}
    with running(runner=runner, async_scheduling=runner == "v2", **settings) as engine:
        check(engine, expected)
        assert (engine.runner_name, engine.stats().scheduler.num_preemptions) == (runner, 0)


@pytest.mark.parametrize(("way", "runner"), [("tensor", "v2"), ("pipeline", "v1"), ("pipeline", "v2")])
def test_every_rank_has_saved_all_of_the_last_request(way: str, runner: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    with running(runner=runner, kv_transfer_config=files(tmp_path), **WAYS[way]) as engine:
        run_requests(engine, {"r": ([40, 50, 60, 40, 50, 60, 40, 50], params)})
    saved = Counter(path.parent.name.rpartition("-")[2] for path in tmp_path.rglob("*.kv"))
    assert saved == {"rank0": 5, "rank1": 5}  # all but the last of 21 tokens have KV


@pytest.mark.parametrize(("way", "runner", "rank"), [("tensor", "v1", 1), ("pipeline", "v2", 0)])
def test_load_that_fails_on_one_rank_has_failed(way: str, runner: str, rank: int, expected: Expected) -> None:
    config = faulty(OFFLOADING, {"rank": rank, "loads": "corrupt"})
    with running(runner=runner, kv_transfer_config=config, **TIGHT, **WAYS[way]) as engine:
        for _ in range(2):
            check(engine, expected)
        transfers = engine.stats().transfers
    assert transfers.loads_failed == transfers.loads_started > 0
    assert transfers.tokens_loaded == 0


@pytest.fixture(scope="module")
def alone() -> Tokens:
    """The tokens of REQUESTS on one engine without drafts and connectors."""
    with running(runner="v1", max_num_seqs=8, **SIZE) as engine:
        return tokens_of(run_requests(engine, REQUESTS))


PAIRS = [("eagle", "tensor", "v2"), ("draft", "pipeline", "v1")]
PAIRS += [(method, "one rank", runner) for method in METHODS for runner in ("v1", "v2")]


@pytest.mark.parametrize("case", PAIRS, ids=", ".join)
def test_prefill_and_decode_engines(case: tuple[str, str, str], alone: Tokens) -> None:
    """Each rank reads the blocks of the same rank elsewhere, those of a drafter's layers too."""
    method, way, runner = case
    settings = {"max_num_seqs": 8, "speculative_config": METHODS[method], **WAYS[way]}
    num_ranks = 1 if way == "one rank" else 2
    with (
        running(runner=runner, kv_transfer_config=nixl("kv_producer"), **settings, **ROOMY) as producer,
        running(runner=runner, kv_transfer_config=nixl("kv_consumer"), **settings, **SIZE) as consumer,
    ):
        assert consumer.runner_name == runner
        held = prefilled(producer)
        assert len(held["long"]["remote_addresses"]) == num_ranks
        assert tokens_of(run_requests(consumer, decodes(held))) == alone
        settle(consumer)
        sent = settle(producer)
        assert sent["sends_sent"] + sent.get("sends_declined", 0) == num_ranks * 4  # each rank counts
        stats = consumer.stats().transfers
        assert (stats.loads_failed, stats.loads_done >= 3) == (0, True)
        assert stats.counters["blocks_loaded"] * 4 == stats.tokens_loaded * num_ranks
