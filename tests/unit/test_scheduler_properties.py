"""Random schedules against a fake model: whatever happens to a request, its tokens are those it would get alone."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.fake_runner import FakeRunner, reference

from fleetfoot.sampling.params import SamplingParams
from fleetfoot.scheduler.request import Request, RequestStatus
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig

VOCAB = 11  # small, so that prompts share prefixes and stop tokens come up


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    max_num_seqs = draw(st.integers(1, 6))
    return SchedulerConfig(
        num_blocks=draw(st.integers(8, 24)),
        block_size=draw(st.integers(1, 5)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=draw(st.booleans()),
        priority=draw(st.booleans()),
    )


def make_request(rng: random.Random, number: int, config: SchedulerConfig) -> Request:
    room = config.num_blocks * config.block_size
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
    )
    return Request(
        f"r{number}",
        prompt,
        params,
        max_tokens=max_tokens,
        seed=0,
        cache_salt=rng.choice([None, None, "a"]),
        priority=rng.randint(0, 2),
    )


@settings(max_examples=400, deadline=None)
@given(config=configs(), depth=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_tokens_do_not_depend_on_the_schedule(config: SchedulerConfig, depth: int, seed: int) -> None:
    rng = random.Random(seed)
    scheduler, runner = Scheduler(config), FakeRunner(config.block_size, VOCAB)
    alive: dict[str, Request] = {}
    everyone: list[Request] = []
    in_flight: deque = deque()
    num_requests = rng.randint(1, 12)
    while len(everyone) < num_requests or scheduler.has_unfinished or in_flight:
        if len(everyone) < num_requests and (not alive or rng.random() < 0.5):
            request = make_request(rng, len(everyone), config)
            everyone.append(request)
            alive[request.request_id] = request
            scheduler.add_request(request)
        if alive and rng.random() < 0.1:
            victim = rng.choice(sorted(alive))
            assert scheduler.finish(victim, RequestStatus.FINISHED_ABORTED) is alive.pop(victim)
        output = scheduler.schedule()
        if output is not None:
            assert output.total_num_scheduled_tokens <= config.max_num_batched_tokens
            in_flight.append((output, runner.run(output)))
        if in_flight and (len(in_flight) > depth or output is None):
            for result in scheduler.update(*in_flight.popleft()):
                if result.request.is_finished:
                    alive.pop(result.request.request_id, None)
        else:
            assert output is not None or not alive, "requests wait, nothing is in flight, and nothing is scheduled"
        scheduler.check_integrity()
    scheduler.check_idle()
    for request in everyone:
        expected = reference(
            request.token_ids[: request.num_prompt_tokens],
            request.max_tokens_in_all - request.num_prompt_tokens,
            request.stop_token_ids,
            request.params.min_tokens,
            VOCAB,
        )
        got = request.output_token_ids
        if request.status == RequestStatus.FINISHED_ABORTED:
            assert got == expected[: len(got)]
        else:
            assert got == expected
