"""Which step runs in which captured shape, and which graphs a start captures."""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.graphs import BatchShape, CaptureTable, StepShape, decode_sizes
from fleetfoot.runner.v2.step_graphs import StepGraphs
from fleetfoot.sampling.shape import EVERYTHING, MASKS, PLAIN, TOP_K, VARIANTS, SamplingVariant

LARGE: dict[str, Any] = {"most_mixed_tokens": 2675, "most_full_tokens": 10_700}


def table(**changes: Any) -> CaptureTable:
    limits = {"device": "cuda", "enforce_eager": False, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    return CaptureTable.of(**{**limits, **changes})


def step(query_lens: list[int], num_decodes: int, **fields: Any) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        rows=list(range(len(query_lens))),
        num_scheduled_tokens=query_lens,
        num_decodes=num_decodes,
        num_sampled=len(query_lens),
        total_num_scheduled_tokens=sum(query_lens),
        **fields,
    )


def mixed(num_reqs: int, num_tokens: int, **fields: Any) -> SchedulerOutput:
    """Decodes, and one prefill."""
    return step([1] * (num_reqs - 1) + [num_tokens - num_reqs + 1], num_reqs - 1, **fields)


def uniform(num_reqs: int, num_drafts: int) -> SchedulerOutput:
    return step([1 + num_drafts] * num_reqs, num_reqs, num_drafts=num_drafts)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 16, 17, 255, 256, 257, 300, 1024])
def test_decode_sizes_reach_the_maximum_and_pad_little(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == most
    for size in range(1, most + 1):
        padding = min(larger for larger in sizes if larger >= size) - size
        assert padding < next(limit for upto, limit in ((2, 1), (4, 2), (16, 8), (64, 16), (most, 32)) if size <= upto)


DRAFTING = table(num_drafts=3, max_num_seqs=64)
FULL = table(**LARGE)


@pytest.mark.parametrize(
    ("shapes", "output", "key"),
    [
        *(
            (table(), step([1] * num_reqs, num_reqs), ("decode", size, size))
            for num_reqs, size in [(1, 1), (3, 4), (5, 8), (8, 8), (9, 16), (17, 32), (65, 96), (255, 256), (256, 256)]
        ),
        (DRAFTING, uniform(10, 3), ("uniform", 16, 64)),
        (DRAFTING, uniform(10, 2), None),
        (DRAFTING, mixed(3, 100, num_drafts=2), ("mixed", 64, 128)),
        (table(num_drafts=3, max_num_seqs=64, max_num_batched_tokens=64), uniform(17, 3), None),
        (table(), mixed(3, 100), ("mixed", 128, 128)),
        (table(), mixed(2, 512), ("mixed", 256, 512)),
        (table(), mixed(2, 129), ("mixed", 160, 160)),
        (table(), mixed(2, 257), ("mixed", 256, 384)),
        (table(), mixed(2, 513), ("mixed", 256, 640)),
        (table(), mixed(2, 1024), ("mixed", 256, 1024)),
        (table(), mixed(2, 1025), None),
        (table(), mixed(20, 8192), None),
        # a step that is nearly full has a shape of its own
        (FULL, mixed(20, 2048), ("mixed", 256, 2048)),
        (FULL, mixed(20, 2049), ("mixed", 256, 2560)),
        (FULL, mixed(20, 7168), ("mixed", 256, 7168)),
        (FULL, mixed(20, 8192 - 257), None),
        (FULL, mixed(20, 8192 - 256), ("mixed", 256, 8192)),
        (FULL, mixed(20, 8192), ("mixed", 256, 8192)),
        (FULL, mixed(20, 8193), None),
        # a longer decode has a kernel of its own, which spreads it over the GPU
        (FULL, mixed(3, 100, longest_decode=8192), ("mixed", 128, 128)),
        (FULL, mixed(3, 100, longest_decode=8193), ("split", 128, 128)),
        (FULL, mixed(3, 8192, longest_decode=8192), ("mixed", 256, 8192)),
        (FULL, mixed(3, 500, longest_decode=8193), ("split", 256, 512)),
        (FULL, mixed(3, 513, longest_decode=8193), None),
        # nothing to replay
        (table(device="cpu"), step([1], 1), None),
        (table(enforce_eager=True), step([1], 1), None),
    ],
)
def test_smallest_shapes(shapes: CaptureTable, output: SchedulerOutput, key: tuple[str, int, int] | None) -> None:
    assert shapes.dispatch(output) == (key and StepShape(*key))


def test_mixed_sizes_grow_where_launches_dominate_and_pad_at_most_a_third() -> None:
    """From 65 tokens on."""
    for shapes, most in ((table(), 1024), (FULL, 7168), (table(most_mixed_tokens=10**6, most_full_tokens=5000), 4096)):
        assert shapes.mixed[-1] == most
        assert all(later <= 1.51 * earlier for earlier, later in pairwise(shapes.mixed[3:]))
    assert table(max_num_batched_tokens=700).mixed == (16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 640)
    assert table(max_num_batched_tokens=700, **LARGE).full_step == 700
    assert FULL.split == table().split == (16, 32, 64, 128, 256, 512)


SHORT = table(short_contexts=((1, 1700), (2, 850), (4, 425)))


@pytest.mark.parametrize(
    ("num_reqs", "longest", "key"),
    [
        (1, 1700, (1, 1700)),
        (1, 1701, (1, 0)),
        (2, 850, (2, 850)),
        (2, 851, (2, 0)),
        (3, 425, (4, 425)),
        (4, 426, (4, 0)),
    ],
)
def test_shapes_for_short_contexts(num_reqs: int, longest: int, key: tuple[int, int]) -> None:
    size, max_context = key
    output = step([1] * num_reqs, num_reqs, longest_decode=longest)
    shape = StepShape("decode", size, size, max_context)
    assert SHORT.dispatch(output) == shape
    assert BatchShape.of_graph(shape).max_context == BatchShape.of_step(output, shape).max_context == max_context
    assert BatchShape.of_step(output, None).max_context == longest


def test_the_shapes_for_short_contexts_of_a_table() -> None:
    assert SHORT.short == (1, 2, 4)
    assert len(SHORT.shapes) == len(table().shapes) + 3
    assert SHORT.dispatch(step([1] * 5, 5, longest_decode=9)) == StepShape("decode", 8, 8)
    # with drafts, the drafter's own steps may be of one token, and attend to their positions too
    drafts = table(short_contexts=((1, 300), (2, 150)), num_drafts=3)
    assert drafts.dispatch(step([4, 4], 2, num_drafts=3, longest_decode=147)) == StepShape("uniform", 2, 8, 147)
    assert drafts.dispatch(step([4, 4], 2, num_drafts=3, longest_decode=148)) == StepShape("uniform", 2, 8)


@pytest.mark.parametrize("shapes", [table(), SHORT, FULL, DRAFTING, CaptureTable()])
def test_the_graphs_of_a_table(shapes: CaptureTable) -> None:
    """A forward pass of each shape; of decodes also whole steps; and samplings of each number of rows of logits."""
    graphs, decodes = {*shapes.graphs}, [shape for shape in shapes.shapes if shape.is_decode]
    assert len(graphs) == len(shapes.graphs)
    assert {key.shape for key in graphs if key.part == "forward"} == {*shapes.shapes}
    wholes = {(shape, sampling) for shape in decodes for sampling in (PLAIN, TOP_K)}
    assert {(key.shape, key.sampling) for key in graphs if key.part == "step"} == wholes
    for shape in shapes.shapes:
        has_sampling = shape.is_decode or not shapes.num_drafts  # mixed batches verify and propose drafts eagerly
        if has_sampling:
            found = {key.sampling for key in graphs if key.part == "sampling" and key.shape == shape.of_sampling}
            assert found >= {*VARIANTS[2 if shape.is_decode else 0 :]}
        assert shapes.captured(shape, PLAIN, 3 * (shape.kind == "uniform")) == (PLAIN if has_sampling else None)
        assert shapes.captured(shape, PLAIN, 3 * (shape.kind != "uniform")) is None
        assert shapes.captured(shape, None, 0) is None
    assert shapes.num_bytes(28, 2048) >= len(shapes.shapes) * 28 * 96 * 1024
    assert shapes.seconds(28) < 2.5
    assert shapes.most_tokens == max((shape.num_tokens for shape in shapes.shapes), default=0)


@pytest.mark.parametrize(
    ("parts", "captured"),
    [
        ({}, PLAIN),
        ({"filters": True}, TOP_K),
        ({"filters": True, "other_filters": True}, EVERYTHING),
        ({"logits_processors": True}, EVERYTHING),
        ({"logprobs": 5}, EVERYTHING),
        ({"masks": True}, MASKS),
        ({"masks": True, "logprobs": 5}, MASKS),
    ],
)
def test_four_variants_of_sampling(parts: dict[str, Any], captured: SamplingVariant) -> None:
    assert SamplingVariant(**parts).captured() == captured


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
    assert [shape.num_tokens for shape in shapes.shapes if shape.kind == "mixed"] == list(shapes.mixed_sizes)
    assert shapes.mixed_sizes == tuple(sorted(set(shapes.mixed_sizes)))


class Device:
    """Captures work as its name."""

    def capture(self, work: Any, warm_up: Any) -> Any:
        return work


def graphs_of(shapes: CaptureTable, **options: bool) -> StepGraphs:
    graphs = StepGraphs(Device(), shapes, **options)  # type: ignore[arg-type]
    graphs.capture_all(lambda key: key, nullcontext)  # type: ignore[arg-type, return-value]
    return graphs


def test_a_step_replays_what_is_captured_for_its_shape_and_sampling() -> None:
    graphs = graphs_of(table())

    def names(output: SchedulerOutput, sampling: SamplingVariant | None, **options: bool) -> list[Any] | None:
        shape, graph = graphs.dispatch(output, sampling, 0, **options)
        if graph is None:
            assert (shape.padded_reqs, shape.padded_tokens) == (shape.num_reqs, shape.num_tokens)
            return None
        parts = [part for part in (graph.forward, graph.sampling) if part is not None]
        assert shape.padded_tokens == graph.forward.shape.num_tokens  # type: ignore[attr-defined]
        return [(part.part, part.sampling) for part in parts] + [graph.waits_for_masks]  # type: ignore[attr-defined]

    decode, prompt = step([1] * 3, 3), mixed(3, 100)
    assert names(decode, PLAIN) == [("step", PLAIN), False]
    assert names(decode, TOP_K) == [("step", TOP_K), False]
    logged = SamplingVariant(logprobs=5)
    assert names(decode, logged) == names(prompt, logged) == [("forward", None), ("sampling", EVERYTHING), False]
    assert names(prompt, PLAIN) == [("forward", None), ("sampling", PLAIN), False]
    assert names(prompt, SamplingVariant(masks=True)) == [("forward", None), ("sampling", MASKS), True]
    assert names(decode, None) == names(prompt, None) == [("forward", None), False]
    assert names(prompt, None, reads_all=True) is None
    assert names(decode, None, reads_all=True) == [("forward", None), False]
    assert names(mixed(3, 1025), PLAIN) is None
    assert graphs.num_steps == {"decode": 5, "mixed": 4, "eager": 2}


def test_ranks_without_sampling_capture_forward_passes() -> None:
    graphs = graphs_of(DRAFTING, has_sampling=False)
    assert {key.part for key in graphs.captured} == {"forward"}
    _, graph = graphs.dispatch(uniform(3, 3), None, 3)
    assert graph is not None and graph.sampling is None


def test_nothing_is_replayed_before_the_captures() -> None:
    graphs = StepGraphs(Device(), table())  # type: ignore[arg-type]
    assert graphs.dispatch(step([1], 1), PLAIN, 0)[1] is None
    graphs.capture_all(lambda key: key, nullcontext)  # type: ignore[arg-type, return-value]
    assert graphs.dispatch(step([1], 1), PLAIN, 0)[1] is not None
    graphs.drop_all()
    assert graphs.dispatch(step([1], 1), PLAIN, 0)[1] is None
