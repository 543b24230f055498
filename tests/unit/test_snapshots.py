"""Prefix hits of models with recurrent states: prompts that share most of a prefix, and conversations."""

import random
from collections.abc import Sequence
from itertools import count

import pytest
from tests.helpers.schedulers import make_scheduler, request_of

from fleetfoot.records.kv_layout import KVGroup
from fleetfoot.records.request import Request
from fleetfoot.records.step import ModelRunnerOutput
from fleetfoot.scheduler.scheduler import Scheduler

BLOCK, VOCAB = 16, 50_000
GROUPS = KVGroup(blocks_per_slab=192), KVGroup(is_state=True)
"""Of Qwen3.6-35B-A3B: a state is as large as KV of 3,072 tokens."""


def scheduler_of(num_slabs: int, max_snapshots: int | None = None) -> Scheduler:
    limits = {"block_size": BLOCK, "max_num_seqs": 16, "max_num_batched_tokens": 8192, "max_snapshots": max_snapshots}
    return make_scheduler(num_blocks=num_slabs, groups=GROUPS, **limits)


def run(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """All of them at once. A sampled token is the number of its step."""
    for request in requests:
        scheduler.add_request(request)
    for token in count():
        if (output := scheduler.schedule()) is None:
            break
        scheduler.update(output, ModelRunnerOutput([[token]] * output.num_sampled))
    scheduler.check_idle()
    scheduler.check_integrity()


ONE_SHIFT, OTHER_SHIFT = (0, 1, 100, 1000), (7, 800, 333, 0)


@pytest.mark.parametrize(
    ("num_prefixes", "num_slabs", "is_at_once", "most", "shifts"),
    [
        (1, 60, False, None, ONE_SHIFT), (1, 60, True, None, OTHER_SHIFT), (8, 100, False, None, ONE_SHIFT),
        (8, 100, False, None, OTHER_SHIFT), (8, 160, True, None, ONE_SHIFT), (8, 200, False, 32, OTHER_SHIFT),
        (8, 200, True, 32, ONE_SHIFT), (8, 200, True, 32, OTHER_SHIFT),
    ],
)  # fmt: skip
def test_prompts_that_share_most_of_a_prefix_hit(
    num_prefixes: int, num_slabs: int, is_at_once: bool, most: int | None, shifts: Sequence[int]
) -> None:
    """In little memory: one prefix and its tails have KV in 3 slabs, running requests a slab each or two."""
    rng, scheduler, size = random.Random(1), scheduler_of(num_slabs, most), 8192

    def tokens(number: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(number)]

    firsts, requests, shared = [tokens(size) for _ in range(num_prefixes)], list[Request](), list[int]()
    for number in range(64):
        turn, prefix = divmod(number, num_prefixes)
        length = size - shifts[turn % len(shifts)]
        requests.append(request_of(str(number), firsts[prefix][:length] + tokens(size + 108 - length), max_tokens=20))
        shared.append(length if turn else 0)
    for batch in [requests] if is_at_once else [[request] for request in requests]:
        run(scheduler, batch)
    hits = sum(request.num_cached_tokens >= 0.9 * length for request, length in zip(requests, shared, strict=True))
    stats = scheduler.stats()
    assert hits >= 60
    states = scheduler.blocks.states
    assert states is not None
    assert most is None or states.pool.num_published <= most
    assert stats.prefix_cache_hits == sum(request.num_cached_tokens for request in requests)
    assert stats.prefix_cache_lost < 0.1 * stats.prefix_cache_hits


@pytest.mark.parametrize("drops_thinking", [False, True])
@pytest.mark.parametrize("first", [40, 3000])
def test_a_conversation_computes_each_token_once(first: int, drops_thinking: bool) -> None:
    """But for the rest of a block; where the template drops a part of the answer, once more from there on. The first
    prompt may be computed in chunks, which a snapshot is one before the end of."""
    scheduler, history, known = scheduler_of(60), list(range(first)), 0
    for turn in range(10):
        request = request_of(str(turn), list(history), max_tokens=77)
        run(scheduler, [request])
        if turn:
            assert known - request.num_cached_tokens <= (64 if turn == 1 and drops_thinking else 0) + BLOCK
        output = request.output_token_ids
        known = len(history) + (0 if drops_thinking else len(output) - 1)  # the last token is not computed
        history += output[50:] if drops_thinking else output
        history += range(10_000 * (turn + 1), 10_000 * (turn + 1) + 23)
