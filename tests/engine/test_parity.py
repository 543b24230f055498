"""Greedy tokens against `transformers`, through the whole engine: alone, batched and cached. `test_kv_groups.py` has
the same in chunks and with preemptions, `test_equivalence.py` all ways against one request alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import prompt_of
from tests.helpers.paged_models import LLAMA3

from fleetfoot import LLM, SamplingParams
from fleetfoot.native.loading import native_problem

NUM_TOKENS = 48
VOCAB = 211
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"head_dim": 16, "max_position_embeddings": 512}
EARLIER = {"original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3-tied": ("llama", {"rope_parameters": {**LLAMA3, **EARLIER}, "tie_word_embeddings": True}),
    "llama-biases-untied": ("llama", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 3}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"hidden_size": 48, "head_dim": 12, "seed": 2}),  # no native kernel
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "num_hidden_layers": 3}),
    "gemma2": ("gemma2", {"sliding_window": 24, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 20}),
}
PROMPTS = [prompt_of(length, VOCAB, seed=length) for length in (1, 13, 37, 70)]
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
MARGIN = 1e-4
"""The reference's best logit leads by more than this at every position, so a difference is no rounding error."""


@dataclass(frozen=True)
class Case:
    folder: Path
    expected: list[list[int]]
    """For each prompt, what `transformers` generates."""


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model_type, fields = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_checkpoint(folder, model_type, **{**SIZES, **fields})
    return Case(folder, [_generate(reference, prompt) for prompt in PROMPTS])


@torch.inference_mode()
def _generate(reference: Any, prompt: list[int]) -> list[int]:
    inputs = {"inputs": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
    special = {"eos_token_id": None, "pad_token_id": 0}
    output = reference.generate(**inputs, **special, max_new_tokens=NUM_TOKENS, do_sample=False)
    logits = reference(output[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]  # [NUM_TOKENS, VOCAB]
    best, second = logits.topk(2).values.T
    assert (best - second).min() > MARGIN, "the reference is undecided: take another seed"
    return output[0, len(prompt) :].tolist()


def _start(case: Case, **keywords: Any) -> LLM:
    settings = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "max_num_seqs": 4, **keywords}
    return LLM(str(case.folder), **settings)


def _tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)
    llm.llm_engine.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


def test_alone_then_batched_with_prefix_hits(case: Case) -> None:
    with _start(case) as llm:
        for prompt, expected in zip(PROMPTS, case.expected, strict=True):
            assert _tokens(llm, [prompt]) == [expected]
        assert llm.stats().scheduler.prefix_cache_hits == 0
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 32, 64]  # full blocks of 16
        assert [output.outputs[0].token_ids for output in outputs] == case.expected
        # the outputs are cached too: a prompt that contains them hits blocks that decodes have filled
        longer = PROMPTS[1] + case.expected[1][:40]
        (output,) = llm.generate({"prompt_token_ids": longer}, PARAMS, use_tqdm=False)
        assert output.num_cached_tokens == 48
        assert output.outputs[0].token_ids[: NUM_TOKENS - 40] == case.expected[1][40:]


def test_in_bfloat16_every_path_agrees() -> None:
    """No reference here: its rounding differs. But a request's tokens may not depend on company, cache or chunks."""
    if native_problem():
        pytest.skip("plain torch rounds bfloat16 in ways that depend on the batch")
    texts = ["Once upon a time", "The fox said", "In the wood there lived a badger who had lost a lantern", "She"]
    seeded: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    params = [SamplingParams(temperature=0.7 * (seed % 2), seed=seed, **seeded) for seed in range(len(texts))]

    def tokens(alone: bool = False, **keywords: Any) -> list[list[int]]:
        with LLM(device="cpu", dtype="bfloat16", **{"max_num_seqs": 4, **keywords}) as llm:
            if alone:
                outputs = [llm.generate(*pair, use_tqdm=False)[0] for pair in zip(texts, params, strict=True)]
            else:
                outputs = llm.generate(texts, params, use_tqdm=False)
            assert (llm.stats().scheduler.num_preemptions > 0) == ("num_gpu_blocks_override" in keywords)
            return [output.outputs[0].token_ids for output in outputs]

    expected = tokens(alone=True)
    assert tokens() == expected
    assert tokens(max_num_batched_tokens=5) == expected
    assert tokens(num_gpu_blocks_override=10, enable_prefix_caching=False) == expected
