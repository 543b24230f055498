"""Which batch runs in which captured shape, and that nothing is captured twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.capture_table import CaptureTable, GraphKey, decode_sizes
from fleetfoot.runner.v2.graphs import GraphManager
from fleetfoot.sampling.shape import EVERYTHING, PLAIN, SamplingVariant


def table(**changes: object) -> CaptureTable:
    wishes = {"device": "cuda", "enforce_eager": False, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    return CaptureTable.of(**{**wishes, **changes})  # type: ignore[arg-type]


def step(query_lens: list[int], num_decodes: int, num_sampled: int | None = None) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        rows=list(range(len(query_lens))),
        num_scheduled_tokens=query_lens,
        num_decodes=num_decodes,
        num_sampled=len(query_lens) if num_sampled is None else num_sampled,
        total_num_scheduled_tokens=sum(query_lens),
    )


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 16, 17, 255, 256, 257, 300, 1024])
def test_decode_sizes_reach_the_most_and_pad_little(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == most
    for wanted in range(1, most + 1):
        padded = min(size for size in sizes if size >= wanted)
        assert padded - wanted < (
            1 if wanted <= 2 else 2 if wanted <= 4 else 8 if wanted <= 16 else 16 if wanted <= 64 else 32
        )


@pytest.mark.parametrize(
    ("num_reqs", "key"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 32), (65, 96), (255, 256), (256, 256)],
)
def test_a_pure_decode_goes_to_the_next_larger_shape(num_reqs: int, key: int) -> None:
    found = table().dispatch(num_reqs=num_reqs, num_tokens=num_reqs, max_query_len=1, is_uniform=True)
    assert found == GraphKey("decode", key, key)


def test_uniform_decodes_have_shapes_of_their_own() -> None:
    shapes = table(num_drafts=3, max_num_seqs=64)
    assert shapes.dispatch(num_reqs=10, num_tokens=40, max_query_len=4, is_uniform=True) == GraphKey("uniform", 16, 64)
    assert shapes.dispatch(num_reqs=10, num_tokens=30, max_query_len=3, is_uniform=True) == GraphKey("mixed", 32, 32)
    assert all(key.num_tokens == 4 * key.num_reqs for key in shapes.keys if key.kind == "uniform")
    narrow = table(num_drafts=3, max_num_seqs=64, max_num_batched_tokens=64)
    assert narrow.dispatch(num_reqs=17, num_tokens=68, max_query_len=4, is_uniform=True) is None


def test_small_mixed_batches_are_captured_and_large_ones_run_eagerly() -> None:
    shapes = table()
    assert shapes.dispatch(num_reqs=3, num_tokens=100, max_query_len=98, is_uniform=False) == GraphKey(
        "mixed", 128, 128
    )
    assert shapes.dispatch(num_reqs=2, num_tokens=512, max_query_len=511, is_uniform=False) == GraphKey(
        "mixed", 256, 512
    )
    assert shapes.dispatch(num_reqs=2, num_tokens=513, max_query_len=512, is_uniform=False) is None
    # Of a small model, whose launches take longer than what they compute.
    for most, largest in ((700, 512), (1024, 1024), (2706, 2048), (10**6, 2048)):
        assert table(most_mixed_tokens=most).mixed[-1] == largest
    assert table(most_mixed_tokens=10**6, max_num_batched_tokens=1500).mixed[-1] == 1024


def mixed(shapes: CaptureTable, num_tokens: int) -> GraphKey | None:
    return shapes.dispatch(num_reqs=20, num_tokens=num_tokens, max_query_len=num_tokens - 19, is_uniform=False)


def test_a_mixed_batch_that_fills_a_step_has_a_shape_of_its_own() -> None:
    shapes = table(most_mixed_tokens=2675, most_full_tokens=10_700)
    assert (shapes.mixed[-1], shapes.full_step, shapes.keys[-1]) == (2048, 8192, GraphKey("mixed", 256, 8192))
    assert mixed(shapes, 2048) == GraphKey("mixed", 256, 2048)
    assert mixed(shapes, 2049) is mixed(shapes, 8192 - 257) is None
    assert mixed(shapes, 8192 - 256) == mixed(shapes, 8192) == GraphKey("mixed", 256, 8192)
    assert mixed(shapes, 8193) is None
    drafting = {"num_tokens": 8192, "max_query_len": 8000, "is_uniform": False, "drafting": 3}
    assert shapes.dispatch(num_reqs=20, **drafting) is None  # type: ignore[arg-type]
    assert mixed(table(), 8192) is None
    assert shapes.first_keys == table().first_keys


def test_a_mixed_batch_with_a_long_decode_runs_eagerly() -> None:
    """Where decodes have a kernel of their own, which spreads each over the GPU."""
    shapes = table(most_mixed_tokens=2675, most_full_tokens=10_700)
    for num_tokens in (100, 8192):
        batch = {"num_reqs": 3, "num_tokens": num_tokens, "max_query_len": 98, "is_uniform": False}
        keys = [shapes.dispatch(**batch, longest_decode=longest) for longest in (0, 8192, 8193)]  # type: ignore[arg-type]
        assert [key is not None for key in keys] == [True, True, False]


@pytest.mark.parametrize(
    ("budget", "most", "full_step"),
    [
        (8192, 8191, None),
        (8192, 8192, 8192),
        (1500, 10**6, 1500),
        (2048, 10**6, None),  # as large as the largest of the others
        (512, 10**6, None),
        (8, 10**6, None),
        (300, 10**6, 300),
    ],
)
def test_which_budgets_are_captured(budget: int, most: int, full_step: int | None) -> None:
    shapes = table(max_num_seqs=8, max_num_batched_tokens=budget, most_mixed_tokens=most, most_full_tokens=most)
    assert shapes.full_step == full_step
    assert [key.num_tokens for key in shapes.keys if key.kind == "mixed"] == list(shapes.mixed_sizes)
    assert shapes.mixed_sizes == tuple(sorted(set(shapes.mixed_sizes)))
    assert table(device="cpu", most_full_tokens=most).full_step is None
    assert table(enforce_eager=True, most_full_tokens=most).full_step is None


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"enforce_eager": True}])
def test_nothing_is_captured_on_a_cpu_or_when_eager(changes: dict[str, object]) -> None:
    shapes = table(**changes)
    assert shapes.keys == ()
    assert shapes.dispatch(num_reqs=1, num_tokens=1, max_query_len=1, is_uniform=True) is None


class FakeCaptures:
    """Counts captures and replays."""

    def __init__(self) -> None:
        self.captured: list[GraphKey] = []
        self.replayed: list[GraphKey] = []

    def __call__(self, key: GraphKey) -> FakeCaptures.One:
        self.captured.append(key)
        return self.One(self, key)

    class One:
        output = None

        def __init__(self, owner: FakeCaptures, key: GraphKey) -> None:
            self.owner, self.key = owner, key

        def replay(self) -> None:
            self.owner.replayed.append(self.key)


def test_a_shape_is_captured_once_when_it_is_first_needed() -> None:
    captures, eager = FakeCaptures(), []
    manager = GraphManager(table(), captures)
    steps = [step([1, 1, 1], 3), step([1, 1, 1, 1], 4), step([1, 40], 1), step([1, 600], 1), step([1, 1, 1], 3)]
    for output in steps:
        shape, key = manager.dispatch(output, sampling=PLAIN)
        assert shape.padded_reqs >= shape.num_reqs
        assert shape.padded_tokens >= shape.num_tokens
        if key is None:
            eager.append(output)
        else:
            manager.get(key).replay()
    assert captures.captured == [GraphKey("decode", 4, 4), GraphKey("mixed", 64, 64)]
    assert captures.replayed == [GraphKey("decode", 4, 4)] * 2 + [GraphKey("mixed", 64, 64), GraphKey("decode", 4, 4)]
    assert eager == [steps[3]]
    assert manager.num_steps == {"decode": 3, "mixed": 1, "eager": 1}
    assert manager.captured == tuple(captures.captured)


def test_a_full_step_is_padded_and_captured_when_it_is_first_met() -> None:
    captures = FakeCaptures()
    manager = GraphManager(table(most_full_tokens=8192), captures)
    manager.capture_first()
    captures.captured.clear()
    shapes = []
    for query_lens in ([1, 8191], [1, 1, 8000], [8192], [1, 7000]):
        shape, key = manager.dispatch(step(query_lens, query_lens.count(1)), sampling=PLAIN)
        shapes.append((shape.padded_reqs, shape.padded_tokens))
        if key is not None:
            manager.get(key).replay()
    assert shapes == [(256, 8192)] * 3 + [(2, 7001)]
    assert captures.captured == [GraphKey("mixed", 256, 8192)]
    assert captures.replayed == captures.captured * 3
    assert manager.num_steps == {"mixed": 3, "eager": 1}
    _, key = manager.dispatch(step([8192], 0), sampling=None)  # somebody wants logprobs of the prompt
    assert key == GraphKey("mixed", 256, 8192, sampling=None)


def test_with_drafts_the_first_shapes_are_those_that_verify_and_draft() -> None:
    captures = FakeCaptures()
    manager = GraphManager(table(num_drafts=3), captures)
    manager.capture_first()
    sizes = (1, 2, 4, 8)
    assert captures.captured == [GraphKey("uniform", size, 4 * size, drafting=3) for size in sizes]
    _, key = manager.dispatch(replace(step([4, 4], 2), num_drafts=3), sampling=PLAIN, drafting=3)
    assert key == captures.captured[1]


def test_the_first_shapes_are_captured_at_the_start_and_not_again() -> None:
    captures = FakeCaptures()
    manager = GraphManager(table(), captures)
    manager.capture_first()
    manager.capture_first()
    assert captures.captured == [GraphKey("decode", size, size) for size in (1, 2, 4, 8)]
    _, key = manager.dispatch(step([1], 1), sampling=PLAIN)
    assert key is not None
    manager.get(key)
    assert len(captures.captured) == 4
    _, other = manager.dispatch(step([1], 1), sampling=None)  # sampling is not part of it: another graph
    assert other is not None
    manager.get(other)
    assert captures.captured[4:] == [GraphKey("decode", 1, 1, sampling=None)]


def test_each_way_of_sampling_is_a_graph_of_its_own_captured_once() -> None:
    captures = FakeCaptures()
    manager = GraphManager(table(), captures)
    ways = [
        PLAIN,
        EVERYTHING,
        SamplingVariant(logits_processors=True),
        SamplingVariant(logprobs=32),
        SamplingVariant(logprobs=64),
    ]
    for sampling in ways * 2:
        _, key = manager.dispatch(step([1, 1, 1], 3), sampling=sampling)
        assert key == GraphKey("decode", 4, 4, sampling)
        manager.get(key).replay()
    assert [key.sampling for key in captures.captured] == ways
    assert manager.num_steps == {"decode": 10}


def test_a_rank_that_does_not_sample_has_one_graph_of_each_shape() -> None:
    captures = FakeCaptures()
    manager = GraphManager(table(), captures, includes_sampling=False)
    manager.capture_first()
    for sampling in (PLAIN, EVERYTHING, None):
        _, key = manager.dispatch(step([1, 1, 1], 3), sampling=sampling, drafting=3)
        assert key == GraphKey("decode", 4, 4, sampling=None)
        manager.get(key)
    assert captures.captured == [GraphKey("decode", size, size, sampling=None) for size in (1, 2, 4, 8)]


def test_a_device_without_graphs_runs_everything_eagerly_and_unpadded() -> None:
    manager = GraphManager(table())
    shape, key = manager.dispatch(step([1, 1, 1], 3), sampling=PLAIN)
    assert key is None
    assert (shape.padded_reqs, shape.padded_tokens) == (3, 3)
    assert manager.captured == ()
