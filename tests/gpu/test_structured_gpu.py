"""Structured outputs on a GPU: tokens are those of a CPU, with masks read by graphs, and free requests beside them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.engines import TEXT_MODEL, make_engine, prompt_of, run_requests

from fleetfoot import SamplingParams
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.kernels.sampling.mask_tokens import mask_tokens_torch, mask_tokens_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]

VOCAB = TEXT_MODEL["vocab_size"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "pets": {"type": "array", "items": {"enum": ["cat", "owl"]}},
    },
    "required": ["name", "pets"],
    "additionalProperties": False,
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": r"[a-c]{2,9}-\d{3}"},
    {"choice": ["positive", "negative", "no opinion"]},
    {"grammar": 'start: "(" WORD ("," WORD)~2 ")"\nWORD: /[a-z]{1,4}/'},
]
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
PATHS: dict[str, dict[str, Any]] = {
    "graphs": {"model_runner": "v2"},
    "eager": {"model_runner": "v2", "enforce_eager": True},
    "drafts": {"model_runner": "v2", **DRAFTS},
    "chunks": {"model_runner": "v2", "max_num_batched_tokens": 24},
    "v1": {"model_runner": "v1"},
}


def tokens(engine: LLMEngine) -> dict[str, list[int]]:
    """Greedy ones under each constraint, and without one."""
    requests = {}
    for number in range(3 * len(CONSTRAINTS)):
        constraint = CONSTRAINTS[number % len(CONSTRAINTS)]
        prompt = prompt_of(5 + 3 * number, VOCAB, seed=number)
        requests[f"bound {number}"] = (
            prompt,
            SamplingParams(temperature=0, max_tokens=40, structured_outputs=constraint),
        )
        requests[f"free {number}"] = prompt, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    return {name: output.outputs[0].token_ids for name, output in run_requests(engine, requests).items()}


@pytest.fixture(scope="module")
def expected(text_model: Path) -> dict[str, list[int]]:
    engine = make_engine(text_model, device="cpu", dtype="float32", model_runner="v1")
    found = tokens(engine)
    engine.shutdown()
    return found


@pytest.mark.parametrize("path", PATHS)
def test_tokens_equal_the_cpus(path: str, text_model: Path, expected: dict[str, list[int]]) -> None:
    engine = make_engine(text_model, device="cuda", dtype="float32", max_model_len=128, **PATHS[path])
    for _ in range(2):
        assert tokens(engine) == expected
    if path in ("graphs", "drafts"):
        assert engine.core.executor.runner.graphs.num_steps["eager"] == 0  # type: ignore[attr-defined]
    engine.shutdown()


@pytest.mark.parametrize("vocab_size", [VOCAB, 151_936, 32_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(70, vocab_size, device="cuda", dtype=dtype)
    masks = torch.randint(-(2**31), 2**31, (33, -(-vocab_size // 32)), device="cuda").to(torch.int32)
    index = torch.full((70,), -1, device="cuda", dtype=torch.int32)
    index[torch.randperm(70, device="cuda")[:33]] = torch.arange(33, device="cuda", dtype=torch.int32)
    reference = logits.clone()
    mask_tokens_torch(reference, masks, index)
    mask_tokens_triton(logits, masks, index)
    assert torch.equal(logits, reference)
    assert 0.4 < torch.isinf(logits[index >= 0]).float().mean().item() < 0.6
