"""Which step runs in which captured shape, and which graphs a start captures."""

from contextlib import nullcontext
from typing import Any

import pytest

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.graphs import CaptureTable, StepShape
from fleetfoot.runner.v2.step_graphs import StepGraphs
from fleetfoot.sampling.shape import EVERYTHING, MASKS, PLAIN, TOP_K, SamplingVariant

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
