"""Random schedules against a fake model: a request has the tokens that it has alone, in every schedule."""

import random
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.fake_connector import Behaviour
from tests.helpers.fake_engine import VOCAB, FakeEngine, check_output, expected_output

from fleetfoot.records.kv_layout import ONE_GROUP, KVGroup
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.scheduler import request_queues, states
from fleetfoot.scheduler.scheduler import SchedulerConfig


@st.composite
def groups(draw: st.DrawFn, num_drafts: int) -> tuple[KVGroup, ...]:
    """One group, or windows and states beside it, or only these: then token ids have blocks of their own."""
    windows = draw(st.lists(st.integers(1, 12), max_size=2, unique=True))
    others = [KVGroup(window, blocks_per_slab=draw(st.integers(1, 4))) for window in windows]
    if draw(st.booleans()):
        others.append(KVGroup(is_state=True, num_slots=1 + num_drafts, blocks_per_slab=draw(st.integers(1, 4))))
    if not others:
        return ONE_GROUP
    if draw(st.booleans()):
        return KVGroup(blocks_per_slab=draw(st.integers(1, 4))), *others
    return KVGroup(blocks_per_slab=40, has_layers=False), *others


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    max_num_seqs = draw(st.integers(1, 6))
    num_drafts = draw(st.sampled_from([0, 0, 0, 1, 2, 3, 4]))
    return SchedulerConfig(
        num_blocks=draw(st.integers(8, 24)),
        block_size=draw(st.integers(1, 5)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs * (1 + num_drafts), 40)),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=draw(st.booleans()),
        priority=draw(st.booleans()),
        num_drafts=num_drafts,
        num_lookahead=draw(st.sampled_from([0, num_drafts])),
        num_stages=draw(st.sampled_from([1, 1, 2, 3])),
        kv_load_failure_policy=draw(st.sampled_from(["recompute", "fail"])),
        groups=draw(st.one_of(st.just(ONE_GROUP), groups(num_drafts))),
    )


def behaviours() -> st.SearchStrategy[Behaviour | None]:
    chance = st.sampled_from([0.0, 0.3, 0.7, 1.0])
    end = st.sampled_from([0.1, 0.5, 1.0])
    return st.none() | st.builds(Behaviour, match=chance, fail=chance, hold=chance, end=end, has_all=st.booleans())


def make_request(rng: random.Random, name: str, config: SchedulerConfig) -> Request:
    room = config.most_tokens
    longest = min(30, room - 1 if config.enable_chunked_prefill else config.max_num_batched_tokens, room - 1)
    size = rng.randint(1, max(1, longest))
    shared = [position % 10 for position in range(size)]
    tail = rng.randint(0, min(size, 3))
    prompt = shared[: size - tail] + [rng.randrange(VOCAB) for _ in range(tail)]
    max_tokens = rng.randint(1, max(1, min(room + 1 - len(prompt), 12)))
    params = SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.5 else [],
        min_tokens=rng.randint(0, max_tokens),
        ignore_eos=True,
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )
    return Request(
        name,
        prompt,
        params,
        max_tokens=max_tokens,
        seed=0,
        cache_salt=rng.choice([None, None, "a"]),
        priority=rng.randint(0, 2),
        flow=rng.choice("aab"),
    )


def run_random_requests(engine: FakeEngine, rng: random.Random) -> None:
    """They are also stopped from outside, and sample invalid tokens; weights change."""
    scheduler, invalid = engine.scheduler, engine.device.invalid

    def make(name: str) -> Request:
        if rng.random() < 0.2:
            invalid[name] = rng.randint(1, 10)
        return make_request(rng, name, scheduler.config)

    def disturb(running: dict[str, Request], have_all_arrived: bool) -> None:
        if rng.random() < 0.03:
            engine.change_weights()
        for name, request in list(running.items()):
            if request.output_token_ids and rng.random() < 0.05:  # as for a stop string in its text
                scheduler.finish(name, RequestStatus.FINISHED_STOPPED, "text")
                del running[name]

    requests = engine.run_random_requests(rng, make, disturb)
    for request in requests:
        num_valid = invalid.get(request.request_id, len(expected_output(request)) + 1) - 1
        check_output(request, scheduler.config.kv_load_failure_policy, num_valid)
        if request.status == RequestStatus.FINISHED_ERROR:
            assert request.stop_reason in ("NaN", "its KV could not be loaded: a fault")
        # with drafts the invalid token may not be the last one of its step
        assert scheduler.config.num_drafts or len(request.output_token_ids) <= num_valid
    if engine.connector is not None:
        assert sorted(engine.connector.finished) == sorted(request.request_id for request in requests)
        assert not engine.connector.loading
        assert not engine.connector.held


@settings(max_examples=300)
@given(
    config=configs(),
    behaviour=behaviours(),
    depth=st.integers(0, 4),
    num_ranks=st.integers(1, 3),
    accuracy=st.sampled_from([0.0, 0.6, 1.0]),
    drafting=st.sampled_from([0.5, 1.0]),
    least_prefill=st.sampled_from([1, 512]),
    seed=st.integers(0, 2**32),
)
def test_tokens_do_not_depend_on_the_schedule(
    config: SchedulerConfig, behaviour: Behaviour | None, depth: int, num_ranks: int, accuracy: float, drafting: float,
    least_prefill: int, seed: int,
) -> None:  # fmt: skip
    """``least_prefill``: tokens of prompts from which on a pipeline spreads them over its steps."""
    rng = random.Random(seed)
    if config.most_tokens < 2 or len(config.groups) > 1:
        behaviour = None
    if config.most_tokens < 2:
        return
    ways = {"num_ranks": num_ranks, "accuracy": accuracy, "drafting": drafting, "depth": depth}
    engine = FakeEngine(config, rng, behaviour=behaviour, **ways)
    chunks = patch.multiple(states, CHUNK=2, MAX_STEPS=3, _LONG=8)  # prompts here are short
    with chunks, patch.object(request_queues, "_LEAST_PREFILL", least_prefill):
        run_random_requests(engine, rng)
    assert behaviour is not None or engine.num_idle_steps == 0
