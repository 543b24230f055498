"""Drafts, KV connectors and parallelism at once, in worker processes: every two ways of these meet on either runner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.small_engines import check_lives
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.faulty_rank import faulty_rank
from tests.helpers.schedules import Life, live_alone, random_lives

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import SamplingParams

MODEL = embedded_model_path()
VOCAB = 2048
SEEDS = (6, 9)
SIZE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 80,
    "block_size": 4,
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 26,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
}
"""Prompts come in chunks, requests are preempted, blocks are evicted, rows change hands."""

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "draft": {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "model": str(Path(__file__).parents[1] / "assets" / "story-draft"),
    },
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
}
WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"num_cpu_blocks": 400},
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


def files(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@contextmanager
def running(**settings: Any) -> Iterator[LLMEngine]:
    engine = make_engine(MODEL, **{**SIZE, **settings})
    try:
        yield engine
    finally:
        engine.shutdown()


def lives_of(seed: int) -> list[Life]:
    """In one of them something comes again and again, which n-grams can foresee."""
    lives = random_lives(seed, VOCAB)
    lives[0].prompt[:] = [40, 50, 60, 40, 50, 60, 40, 50]
    return lives


@pytest.fixture(scope="module")
def expected() -> dict[int, dict[str, RequestOutput]]:
    with running(runner="v1", enable_prefix_caching=False, max_num_seqs=1) as engine:
        return {seed: live_alone(engine, lives_of(seed)) for seed in SEEDS}


def check(engine: LLMEngine, expected: dict[int, dict[str, RequestOutput]], seeds: Iterable[int] = SEEDS) -> None:
    for seed in seeds:
        check_lives(engine, lives_of(seed), expected[seed])


def test_every_pair_is_there() -> None:
    for first in range(4):
        for second in range(first):
            names = [{case[place] for case in CASES if case[2] != "both"} for place in (first, second)]
            pairs = {(case[first], case[second]) for case in CASES}
            assert {(one, other) for one in names[0] for other in names[1]} <= pairs


@pytest.mark.parametrize(("method", "connector", "way", "runner"), CASES, ids=[", ".join(case) for case in CASES])
def test_tokens_are_those_of_one_process_without_drafts(
    method: str, connector: str, way: str, runner: str, tmp_path: Path, expected: dict[int, dict[str, RequestOutput]]
) -> None:
    settings = {"runner": runner, "speculative_config": {**METHODS[method], "adaptive": False}, **WAYS[way]}
    if connector != "none":
        settings["kv_transfer_config"] = OFFLOADING if connector == "host" else files(tmp_path)
    if connector == "files":  # what one engine saves, another one loads
        with running(**settings) as engine:
            check(engine, expected, SEEDS[:1])
    with running(**settings) as engine:
        assert engine.runner_name == runner
        check(engine, expected)
        if connector == "host":  # a second time: what was evicted since the first comes back
            check(engine, expected)
        stats = engine.stats()
    drafts, transfers = stats.drafts, stats.transfers
    assert stats.scheduler.num_preemptions > 0
    assert 0 < drafts.num_accepted < drafts.num_drafted
    assert (transfers.loads_failed, transfers.loads_started) == (0, transfers.loads_done)
    assert (transfers.tokens_loaded > 0) == (connector != "none")


@pytest.mark.parametrize(("way", "runner"), [("tensor", "v2"), ("pipeline", "v1"), ("pipeline", "v2")])
def test_every_rank_has_saved_all_of_a_request_that_was_the_last(way: str, runner: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=13, ignore_eos=True)
    with running(runner=runner, kv_transfer_config=files(tmp_path), **WAYS[way]) as engine:
        run_requests(engine, {"r": ([40, 50, 60, 40, 50, 60, 40, 50], params)})
    saved = Counter(path.parent.name.rpartition("-")[2] for path in tmp_path.rglob("*.kv"))
    assert saved == {"rank0": 5, "rank1": 5}  # all but the last of 21 tokens have KV


@pytest.mark.parametrize(("way", "runner", "rank"), [("tensor", "v1", 1), ("pipeline", "v2", 0)])
def test_a_load_that_fails_on_one_rank_has_failed(
    way: str, runner: str, rank: int, expected: dict[int, dict[str, RequestOutput]]
) -> None:
    faulty = faulty_rank(OFFLOADING, rank, "loads")
    with running(runner=runner, kv_transfer_config=faulty, **WAYS[way]) as engine:
        for _ in range(2):
            check(engine, expected)
        transfers = engine.stats().transfers
    assert transfers.loads_failed == transfers.loads_started > 0
    assert transfers.tokens_loaded == 0
