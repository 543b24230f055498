"""Which step runs in which captured shape, and that nothing is captured twice."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.graphs import BatchShape, CaptureTable, GraphKey, GraphManager, decode_sizes
from fleetfoot.runner.v2.warm_up import captures_of_start
from fleetfoot.sampling.shape import EVERYTHING, MASKS, PLAIN, TOP_K, SamplingVariant

LARGE: dict[str, Any] = {"most_mixed_tokens": 2675, "most_full_tokens": 10_700}
FIRST_SIZES = (1, 2, 4, 8)


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
        (DRAFTING, mixed(3, 100, num_drafts=2), ("mixed", 64, 128, None)),
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
        (FULL, mixed(3, 100, longest_decode=8193), ("mixed", 128, 128, PLAIN, None, True)),
        (FULL, mixed(3, 8192, longest_decode=8192), ("mixed", 256, 8192)),
        (FULL, mixed(3, 8192, longest_decode=8193), ("mixed", 256, 8192, PLAIN, None, True)),
        (FULL, mixed(3, 7500, longest_decode=8193), None),
        # nothing to replay
        (table(device="cpu"), step([1], 1), None),
        (table(enforce_eager=True), step([1], 1), None),
    ],
)
def test_smallest_shapes(shapes: CaptureTable, output: SchedulerOutput, key: tuple[str, int, int] | None) -> None:
    assert shapes.dispatch(output) == (key and GraphKey(*key))
    if key is not None and key[0] == "mixed":  # what verifies or proposes drafts is not in the graph
        assert shapes.dispatch(output, drafting=3) == replace(GraphKey(*key), sampling=None)


def test_mixed_shapes_grow_where_launches_dominate() -> None:
    for most, largest in ((700, 512), (1024, 1024), (2706, 2048), (10**6, 2048)):
        assert table(most_mixed_tokens=most).mixed[-1] == largest
    assert table(most_mixed_tokens=10**6, max_num_batched_tokens=1500).mixed[-1] == 1024


def test_fine_sizes_pad_at_most_a_third() -> None:
    """From 65 tokens on, up to the sizes that are captured at all, and beyond those of `mixed`."""
    for shapes, most in ((table(), 1024), (FULL, 7168), (table(most_mixed_tokens=10**6, most_full_tokens=5000), 4096)):
        sizes = sorted((*shapes.mixed, *shapes.fine))
        assert sizes[-1] == most
        assert not {*shapes.mixed} & {*shapes.fine}
        assert all(later <= 1.51 * earlier for earlier, later in pairwise(sizes[3:]))
    assert table(max_num_batched_tokens=700).fine == (96, 160, 192, 384, 640)
    assert table(max_num_batched_tokens=700, **LARGE).full_step == 700
    assert {key.sampling for key in DRAFTING.fine_with_sampling(TOP_K)} == {None}


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
    shape = GraphKey("decode", size, size, max_context=max_context)
    assert SHORT.dispatch(output) == shape
    assert shape in SHORT.first_keys  # a context that grows does not wait for a capture
    assert BatchShape.of_graph(shape).max_context == BatchShape.of_step(output, shape).max_context == max_context
    assert BatchShape.of_step(output, None).max_context == longest


def test_the_shapes_for_short_contexts_of_a_table() -> None:
    assert SHORT.short == (1, 2, 4)
    assert [key.num_reqs for key in SHORT.first_keys] == [1, 1, 2, 2, 4, 4, 8]
    assert len(SHORT.keys) == len(table().keys) + 3
    assert SHORT.dispatch(step([1] * 5, 5, longest_decode=9)) == GraphKey("decode", 8, 8)
    # with drafts, the drafter's own steps may be of one token, and attend to their positions too
    drafts = table(short_contexts=((1, 300), (2, 150)), num_drafts=3)
    assert drafts.dispatch(step([4, 4], 2, num_drafts=3, longest_decode=147)) == GraphKey(
        "uniform", 2, 8, max_context=147
    )
    assert drafts.dispatch(step([4, 4], 2, num_drafts=3, longest_decode=148)) == GraphKey("uniform", 2, 8)


def test_the_keys_of_a_table() -> None:
    assert (FULL.mixed[-1], FULL.full_step, FULL.keys[-1]) == (2048, 8192, GraphKey("mixed", 256, 8192))
    assert FULL.first_keys == table().first_keys
    assert all(key.num_tokens == 4 * key.num_reqs for key in DRAFTING.keys if key.kind == "uniform")
    assert table(device="cpu", **LARGE).keys == table(enforce_eager=True, **LARGE).keys == ()
    assert table(device="cpu", **LARGE).fine == table(enforce_eager=True, **LARGE).fine == ()
    assert (FULL.most_tokens, table(most_mixed_tokens=512).most_tokens, CaptureTable().most_tokens) == (8192, 1024, 0)
    num_mixed = len(FULL.mixed_sizes)  # of which all samplers share the forward pass; another one is for long contexts
    assert FULL.most_graphs == 3 * (len(FULL.keys) - num_mixed) + 2 * num_mixed + len(FULL.fine)


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


class Captures:
    """Records what a manager captures."""

    def __init__(self, shapes: CaptureTable, **options: bool) -> None:
        self.captured: list[GraphKey] = []
        self.manager = GraphManager(shapes, self.capture, **options)
        self.not_compiled: set[GraphKey] = set()

    def capture(self, key: GraphKey) -> Any:
        if key in self.not_compiled:
            return None
        self.captured.append(key)
        if not key.is_whole:
            self.manager.forwards[key.forward] = self
        return self

    def run(self, output: SchedulerOutput, **options: Any) -> GraphKey | None:
        """Dispatch a step and capture its graph."""
        shape, key = self.manager.dispatch(output, **{"sampling": PLAIN, **options})
        padded = shape.padded_reqs, shape.padded_tokens
        if key is None:
            assert padded == (shape.num_reqs, shape.num_tokens)
        else:
            assert padded == (key.num_reqs, key.num_tokens)
            assert padded >= (shape.num_reqs, shape.num_tokens)
            assert self.manager.get(key) is self
        return key


def test_a_shape_is_captured_once_when_it_is_first_needed() -> None:
    captures, decode, small = Captures(table()), GraphKey("decode", 4, 4), GraphKey("mixed", 64, 64)
    outputs = [step([1] * 3, 3), step([1] * 4, 4), step([1, 40], 1), step([1, 1600], 1), step([1] * 3, 3)]
    assert [captures.run(output) for output in outputs] == [decode, decode, small, None, decode]
    assert captures.captured == [decode, small]
    assert list(captures.manager.captured) == [small, decode]  # the one that was used last is the last
    assert captures.manager.num_steps == {"decode": 3, "mixed": 1, "eager": 1}


def test_a_fine_shape_is_captured_once_it_has_saved_as_much_as_a_capture_takes() -> None:
    """Until then, steps are padded to a coarser shape, and those beyond the coarse shapes run eagerly."""
    captures = Captures(table(most_mixed_tokens=200))  # 400 tokens are 3.1 times 128
    fine, coarse = GraphKey("mixed", 256, 384), GraphKey("mixed", 256, 512)
    assert [captures.run(mixed(3, 300)) for _ in range(6)] == [coarse] * 3 + [fine] * 3
    assert captures.captured == [coarse, fine]
    assert [captures.run(mixed(3, 600)) for _ in range(5)] == [None] * 3 + [GraphKey("mixed", 256, 640)] * 2
    assert captures.run(mixed(3, 300), sampling=TOP_K) == replace(fine, sampling=TOP_K)  # it shares the forward pass
    assert captures.manager.num_steps == {"mixed": 9, "eager": 3}


def test_a_forward_pass_that_is_captured_is_used_with_every_sampler() -> None:
    captures = Captures(table(most_mixed_tokens=200))
    fine = GraphKey("mixed", 256, 384)
    assert fine.forward == replace(fine, sampling=TOP_K).forward != replace(fine, sampling=None).forward
    decodes = [GraphKey("decode", 1, 1, sampling).forward for sampling in (PLAIN, TOP_K, None, MASKS, EVERYTHING)]
    assert len({*decodes}) == 4 and decodes[3] == decodes[4]  # the most common ones are whole
    assert captures.run(mixed(3, 300)) == GraphKey("mixed", 256, 512)
    captures.manager.forwards[fine.forward] = captures  # type: ignore[assignment]
    assert captures.run(mixed(3, 300)) == fine
    assert captures.run(mixed(3, 300), sampling=TOP_K) == replace(fine, sampling=TOP_K)
    captures.not_compiled = {replace(fine, sampling=MASKS)}
    assert captures.manager.dispatch(mixed(3, 300), sampling=MASKS)[1] == replace(fine, sampling=MASKS)
    assert captures.run(mixed(3, 300), sampling=None) != replace(fine, sampling=None)


def test_a_shape_for_long_contexts_is_captured_after_four_eager_steps() -> None:
    """Also where another graph of its size is there: with the prefill kernel, the decode would take too long."""
    captures = Captures(table())
    short, long = mixed(3, 100), mixed(3, 100, longest_decode=20000)
    key = GraphKey("mixed", 128, 128)
    split = replace(key, splits_decodes=True)
    assert [captures.run(output) for output in (short, long, long, long, short, long, long)] == [
        *(key, None, None, None, key, split, split)
    ]
    assert captures.captured == [key, split]


def test_a_fine_shape_waits_for_its_kernels_in_a_coarse_one() -> None:
    captures = Captures(table(most_mixed_tokens=1))
    fine, coarse = GraphKey("mixed", 256, 384), GraphKey("mixed", 256, 512)
    captures.not_compiled = {fine}
    assert [captures.run(mixed(3, 300)) for _ in range(2)] == [coarse] * 2
    captures.not_compiled = set()
    assert captures.manager.capture_next()  # between requests, before others
    assert captures.captured == [coarse, fine]
    assert captures.run(mixed(3, 300)) == fine


def test_a_fine_shape_that_was_dropped_has_to_pay_again() -> None:
    captures = Captures(table(most_mixed_tokens=64))
    fine, coarse = GraphKey("mixed", 256, 384), GraphKey("mixed", 256, 512)
    assert [captures.run(mixed(3, 300)) for _ in range(2)] == [fine] * 2
    del captures.manager.captured[fine], captures.manager.forwards[fine.forward]
    captures.manager.table = replace(captures.manager.table, capture_tokens=129)
    assert [captures.run(mixed(3, 300)) for _ in range(2)] == [coarse, fine]


def test_shapes_are_captured_between_requests() -> None:
    """Those that came before their kernels, then others with the sampling that steps have had."""
    captures, shapes = Captures(table(max_num_seqs=2)), table(max_num_seqs=2)
    manager, one, two = captures.manager, GraphKey("decode", 1, 1), GraphKey("decode", 2, 2)
    assert not manager.capture_next()
    captures.not_compiled = {two}
    assert manager.get(two) is None and captures.run(step([1], 1)) == one
    assert manager.capture_next()  # the largest of those that may be needed
    assert captures.captured == [one, shapes.keys[-1]]
    captures.not_compiled = set()
    while manager.capture_next():
        pass
    assert captures.captured[2] == two
    fine = [GraphKey("mixed", 2, size) for size in shapes.fine]
    assert {*captures.captured} == {*shapes.keys, *fine}
    assert captures.captured[-len(fine) :] == fine[::-1]
    assert not manager.capture_next()
    for use in (lambda: manager.get(one), manager.capture_next):
        manager.outdated[one] = None
        assert use() and captures.captured.pop() == one
        assert not manager.capture_next()
    captures.not_compiled, manager.outdated[one] = {one}, None
    assert manager.get(one) is captures  # the graph that there is


def test_no_more_graphs_than_the_memory_plan_counts() -> None:
    """Forward passes: those that samplers share are one. The number of samplings is limited, too."""
    shapes = table(max_num_seqs=1)
    captures, most = Captures(shapes), shapes.most_graphs
    manager = captures.manager
    one, variants = GraphKey("decode", 1, 1), [SamplingVariant(logprobs=32 * number) for number in range(4 * most)]
    for sampling in variants:
        for key in (one, replace(one, sampling=sampling)):
            assert manager.get(key) is captures
    left = [key.sampling for key in manager.captured]
    assert left == [*variants[1:-1], PLAIN, variants[-1]]  # the plain one was used all the time
    assert {*manager.forwards} == {replace(one, sampling=MASKS)}
    for length in range(1, most + 1):  # other forward passes
        manager.get(replace(one, max_context=length))
    assert len(manager.captured) == most and not manager.forwards
    alone = Captures(shapes)  # whose forward passes wait for their samplers' kernels
    alone.manager.forwards.update({replace(one, max_context=n, sampling=MASKS): alone for n in range(most + 1)})  # type: ignore[misc]
    assert alone.manager.get(one) is alone and [*alone.manager.captured] == [one]
    assert {key.sampling for key in manager.captured} == {PLAIN}
    manager.drop_all()
    assert not manager.captured


def test_better_kernels_of_a_forward_pass_are_for_all_that_share_it() -> None:
    captures, one = Captures(table()), GraphKey("decode", 1, 1)
    manager, keys = captures.manager, [replace(one, sampling=each) for each in (PLAIN, TOP_K, MASKS, EVERYTHING)]
    for key in keys:
        manager.get(key)
    manager.outdate([keys[3]])
    assert not manager.forwards and [*manager.outdated] == keys[2:]
    assert manager.get(keys[3]) is captures and [*manager.forwards] == [keys[2]]
    assert manager.capture_next() and not manager.outdated
    assert captures.captured == [*keys, keys[3], keys[2]]
    manager.outdate([GraphKey("decode", 2, 2), keys[0]])
    assert [*manager.outdated] == [keys[0]]


def test_a_full_step_is_padded_and_captured_when_it_is_first_needed() -> None:
    captures, full = Captures(table(most_full_tokens=8192)), GraphKey("mixed", 256, 8192)
    captures.manager.capture_first()
    captures.captured.clear()
    outputs = [step([1, 8191], 1), step([1, 1, 8000], 2), step([8192], 0), step([1, 7500], 1)]
    assert [captures.run(output) for output in outputs] == [full, full, full, None]
    assert captures.captured == [full]
    assert captures.manager.num_steps == {"mixed": 3, "eager": 1}
    assert captures.run(step([8192], 0), sampling=None) == replace(full, sampling=None)  # with prompt logprobs


def test_the_first_shapes_are_captured_at_the_start_and_not_again() -> None:
    captures = Captures(table())
    captures.manager.capture_first()
    captures.manager.capture_first()
    assert captures.captured == [GraphKey("decode", size, size) for size in FIRST_SIZES]
    assert captures.run(step([1], 1)) is not None
    assert len(captures.captured) == 4
    captures.run(step([1], 1), sampling=None)
    assert captures.captured[4:] == [GraphKey("decode", 1, 1, sampling=None)]


@pytest.mark.parametrize("includes_sampling", [True, False])
def test_common_graphs_are_captured_at_the_start_where_their_kernels_are_ready(includes_sampling: bool) -> None:
    shapes = table(most_full_tokens=8192)
    captures = Captures(shapes, includes_sampling=includes_sampling)
    captures.manager.capture_first()
    first = [*captures.captured]
    captures.manager.capture_common(lambda key: (key.kind, key.num_tokens) != ("mixed", 32), 1000)
    variants = (PLAIN, TOP_K) if includes_sampling else (None,)
    keys = [key for key in shapes.keys if (key.kind, key.num_tokens) != ("mixed", 32)]
    expected = {replace(key, sampling=variant) for key in keys for variant in variants}
    if includes_sampling:
        expected |= {replace(key, sampling=MASKS) for key in keys if key.kind == "decode"}
    fine = [GraphKey("mixed", min(256, size), size, variants[0]) for size in reversed(shapes.fine)]
    assert {*captures.captured} == expected | {*fine}
    assert len(captures.captured) == len(expected) + len(fine)
    assert [key for key in captures.captured if key in fine] == fine
    others = [key for key in captures.captured if key.sampling == variants[0] and key not in (*first, *fine)]
    sizes = [key.num_tokens for key in others]
    assert sizes == sorted(sizes, reverse=True)  # the others fit in the memory of the largest
    assert captures.captured[4].num_tokens == 8192
    assert captures.run(step([100], 0)) in expected
    assert captures.run(step([350], 0)) in fine  # without padding as many tokens as its capture costs
    assert len(captures.captured) == len(expected) + len(fine)


def test_a_start_captures_so_many_graphs() -> None:
    assert [captures_of_start(layers) for layers in (28, 80, 1)] == [89, 31, 2500]
    captures = Captures(table())
    captures.manager.capture_first()
    captures.manager.capture_common(lambda key: True, 7)
    # with top-k, mixed batches share the forward pass
    assert [key.num_tokens for key in captures.captured] == [1, 2, 4, 8, 512, 256, 256, 512, 256]
    assert len({key.forward for key in captures.captured}) == 7
    captures.manager.capture_common(lambda key: True, 3)
    assert len(captures.captured) == 9


def test_with_drafts_the_first_shapes_verify_and_draft() -> None:
    captures = Captures(table(num_drafts=3))
    captures.manager.capture_first()
    assert captures.captured == [GraphKey("uniform", size, 4 * size, drafting=3) for size in FIRST_SIZES]
    assert captures.run(uniform(2, 3), drafting=3) == captures.captured[1]
    captures.manager.capture_common(lambda key: True, 1000)
    kinds = {(key.kind, key.drafting, key.sampling is None) for key in captures.captured}
    assert kinds == {("uniform", 3, False), ("mixed", None, True)}


def test_each_sampling_variant_is_a_graph_of_its_own_captured_once() -> None:
    captures = Captures(table())
    variants = [PLAIN, EVERYTHING, *(SamplingVariant(logits_processors=True, logprobs=n) for n in (0, 32, 64))]
    for sampling in variants * 2:
        assert captures.run(step([1, 1, 1], 3), sampling=sampling) == GraphKey("decode", 4, 4, sampling)
    assert [key.sampling for key in captures.captured] == variants
    assert captures.manager.num_steps == {"decode": 10}


def test_a_rank_that_does_not_sample_has_one_graph_of_each_shape() -> None:
    captures = Captures(table(), includes_sampling=False)
    captures.manager.capture_first()
    for sampling in (PLAIN, EVERYTHING, None):
        assert captures.run(step([1] * 3, 3), sampling=sampling, drafting=3) == GraphKey("decode", 4, 4, sampling=None)
    assert captures.captured == [GraphKey("decode", size, size, sampling=None) for size in FIRST_SIZES]


def test_a_device_without_graphs_runs_everything_eagerly_and_unpadded() -> None:
    manager = GraphManager(table())
    shape, key = manager.dispatch(step([1, 1, 1], 3), sampling=PLAIN)
    assert key is None
    assert (shape.padded_reqs, shape.padded_tokens) == (3, 3)
    assert not manager.captured
