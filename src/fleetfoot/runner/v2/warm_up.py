"""Made-up steps that make every kernel compile and every buffer be touched, before the first request comes."""

from __future__ import annotations

from fleetfoot.sampling.params import SamplingParams
from fleetfoot.scheduler.output import NewRequest, SchedulerOutput

NAME = "warm-up"


def warm_up_steps(max_num_batched_tokens: int, max_model_len: int, block_size: int) -> list[SchedulerOutput]:
    """A prefill and a decode of one request, in row 0 and block 0.

    Rows and blocks are the scheduler's, which knows nothing of this; what is left in them is written over before anyone
    reads it.
    """
    length = max(1, min(4, block_size, max_num_batched_tokens, max_model_len - 1))
    request = NewRequest(
        request_id=NAME,
        row=0,
        token_ids=[0] * length,
        num_prompt_tokens=length,
        num_computed_tokens=0,
        block_ids=[0],
        params=SamplingParams(max_tokens=2, temperature=1.0),
        seed=0,
        stop_token_ids=frozenset(),
        bad_words_token_ids=[],
    )
    prefill = SchedulerOutput(
        step=-2,
        rows=[0],
        num_scheduled_tokens=[length],
        num_decodes=int(length == 1),
        num_sampled=1,
        total_num_scheduled_tokens=length,
        new_requests=[request],
    )
    decode = SchedulerOutput(
        step=-1,
        rows=[0],
        num_scheduled_tokens=[1],
        num_decodes=1,
        num_sampled=1,
        total_num_scheduled_tokens=1,
    )
    return [prefill, decode]
