"""Requests that are preempted: logprobs of their prompts, priorities, and one that fills the whole cache."""

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import reference_logits
from tests.helpers.engines import TEXT_MODEL, drain, make_engine, prompt_of, run_requests

from fleetfoot import LLMEngine, SamplingParams

VOCAB = TEXT_MODEL["vocab_size"]
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 20, "block_size": 4, "max_num_seqs": 4}


def preemptions(engine: LLMEngine) -> int:
    return engine.stats().scheduler.num_preemptions


def seeded(number: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"seed": number, "max_tokens": 40, "ignore_eos": True, **params})


def test_prompt_logprobs_of_a_preempted_prefill(text_checkpoint: tuple[Path, Any]) -> None:
    """The first chunks are computed twice; each position must be reported once."""
    folder, reference = text_checkpoint
    engine = make_engine(folder, num_gpu_blocks_override=18, block_size=4, max_num_seqs=3, max_num_batched_tokens=6)
    prompt = prompt_of(44, VOCAB, 9)
    for number in range(2):  # they grow, and need the blocks that the long prompt was admitted with
        engine.add_request(str(number), prompt_of(4, VOCAB, number), seeded(number, max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.add_request("long", prompt, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1))
    outputs = drain(engine)
    assert preemptions(engine) > 0
    (long,) = [output for output in outputs if output.request_id == "long" and output.finished]
    assert long.prompt_logprobs is not None and len(long.prompt_logprobs) == len(prompt)
    logprobs = reference_logits(reference, prompt).log_softmax(-1)
    expected = [logprobs[i - 1, prompt[i]].item() for i in range(1, len(prompt))]
    found = [entry.get(prompt[i]) for i, entry in enumerate(long.prompt_logprobs) if entry is not None]
    assert [entry.logprob if entry else None for entry in found] == pytest.approx(expected, abs=1e-4)
    engine.shutdown()


def test_requests_of_low_priority_are_preempted(text_model: Path) -> None:
    """Those of high priority arrive last, finish first, and are never preempted."""
    engine = make_engine(text_model, **TIGHT, scheduling_policy="priority")
    for number in range(3):
        engine.add_request(f"low{number}", prompt_of(10, VOCAB, number), seeded(number), priority=5)
    for _ in range(5):
        engine.step()
    for number in range(2):
        engine.add_request(f"high{number}", prompt_of(10, VOCAB, number), seeded(number), priority=-1)
    finished = [output for output in drain(engine) if output.finished]
    assert {output.request_id for output in finished[:2]} == {"high0", "high1"}
    assert preemptions(engine) > 0
    tokens = {output.request_id: output.outputs[0].token_ids for output in finished}
    assert tokens["high0"] == tokens["low0"] and tokens["high1"] == tokens["low1"]
    engine.shutdown()


def test_one_request_fills_the_whole_cache(text_model: Path) -> None:
    """80 tokens of KV hold 40 of prompt and 40 of output."""
    engine = make_engine(text_model, **TIGHT)
    output = run_requests(engine, {"r": (prompt_of(40, VOCAB), SamplingParams(temperature=0, max_tokens=None))})["r"]
    other = run_requests(engine, {"r": (prompt_of(40, VOCAB), seeded(0, max_tokens=40))})["r"]
    assert len(other.outputs[0].token_ids) == 40
    assert output.outputs[0].finish_reason in ("length", "stop")
    assert engine.input_processor.max_model_len == 80
    engine.shutdown()
