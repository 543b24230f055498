"""Models with sliding windows and recurrent states: blocks before a window are freed, tokens are those of transformers,
and a freed block may hold anything."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import make_engine, prompt_of
from tests.helpers.paged_models import MODELS as STATES

from fleetfoot import LLMEngine, RequestOutput, SamplingParams

VOCAB = 101
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "head_dim": 16, "max_position_embeddings": 512}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 7}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, **ALTERNATING, "query_pre_attn_scalar": 16}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 20, **ALTERNATING}),
    **{name: STATES[name] for name in ("lfm2", "qwen3-next")},
}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 11, "block_size": 4},
    "chunks within a block": {"max_num_batched_tokens": 9, "block_size": 16},
    "tight": {"max_num_batched_tokens": 40, "block_size": 2},
    "whole": {"enable_chunked_prefill": False, "max_model_len": 120, "max_num_batched_tokens": 120, "block_size": 4},
    "drafts": {"block_size": 4, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "overlapped": {"block_size": 4, "max_num_batched_tokens": 16, "async_scheduling": True},
}
TIGHT = {"mistral": 14, "gemma3": 70, "qwen3": 70, "lfm2": 30, "qwen3-next": 5}
"""Slabs of "tight": requests with a layer that attends to all tokens are preempted."""
PROMPTS = [prompt_of(length, VOCAB, seed=length) for length in (3, 61, 40, 9, 24)]
PROMPTS += [PROMPTS[1][:48] + prompt_of(7, VOCAB, seed=1), PROMPTS[1]]  # of which a prefix is cached
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[list[int]]]:
    """Its name, a checkpoint, and the greedy outputs of its reference."""
    kind, config = MODELS[request.param]
    folder = tmp_path_factory.mktemp(kind)
    reference = make_checkpoint(folder, kind, **{**SIZES, **config})
    outputs = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(PARAMS.max_tokens or 0):
            with torch.no_grad():
                tokens.append(int(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        outputs.append(tokens[len(prompt) :])
    return request.param, folder, outputs


def poison(engine: LLMEngine, value: float) -> None:
    """A value in every block that is not in use and has no cached prefix."""
    pools, runner, layout = engine.core.scheduler.pools, engine.core.executor.runner, engine.core.executor.layout
    for group, pool in enumerate(pools.all):
        free = [block for block in pool._plain_blocks() if pool.state(block) == "FREE" and block >= pool._first]
        owned = {block // pool.size for block in free} & pool._plain_of.keys() if hasattr(pool, "size") else None
        blocks = [block for block in free if owned is None or block // pool.size in owned]
        for layer, kv_cache in enumerate(runner._kv_caches):
            if layout.group_of_layers[layer] == group:
                kv_cache[blocks] = value


def run(engine: LLMEngine, value: float | None = None) -> list[list[int]]:
    """All prompts, half of them first; tokens of each."""
    outputs: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, PARAMS)
        for _ in range(4 * (number % 3)):
            outputs |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
        if value is not None:
            poison(engine, value)
    engine.core.scheduler.check_idle()
    return [list(outputs[str(number)].outputs[0].token_ids) for number in range(len(PROMPTS))]


@pytest.mark.parametrize("setting", ENGINES)
def test_tokens_are_those_of_transformers(model: tuple[str, Path, list[list[int]]], setting: str) -> None:
    name, folder, expected = model
    runner = "v1" if ([*MODELS].index(name) + [*ENGINES].index(setting)) % 3 == 0 else "v2"
    slabs = TIGHT[name] if setting == "tight" else None
    options = {"model_runner": runner, "skip_tokenizer_init": True, "num_gpu_blocks_override": slabs}
    engine = make_engine(folder, **options, **ENGINES[setting])
    try:
        assert len(engine.core.scheduler.config.groups) == 2
        for _ in range(2):  # the second time with cached prefixes
            # drafts past the end of a request have no KV, and are read with a weight of 0
            value = 1e30 if setting == "drafts" else float("nan")
            assert run(engine, None if setting == "overlapped" else value) == expected
        stats = engine.stats().scheduler
        # a prompt that is not divided leaves no state at the end of a block
        assert stats.prefix_cache_hits > 0 or setting == "tight" or (setting == "whole" and name in STATES)
        assert (stats.num_preemptions > 0) == (setting == "tight" and name != "mistral")  # it stops to grow
    finally:
        engine.shutdown()


def test_a_drafter_joins_the_first_group(pytestconfig: pytest.Config) -> None:
    """Of a target with windows alone: its first group then has layers. The tokens are those without drafts."""
    assets = pytestconfig.rootpath / "tests" / "assets"
    drafts = {"method": "draft_model", "model": str(assets / "story-draft"), "num_speculative_tokens": 3}
    found = []
    for speculative, has_layers in ((None, False), (drafts, True)):
        options = {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 40, "skip_tokenizer_init": True}
        engine = make_engine(assets / "story-mistral", speculative_config=speculative, **options)
        assert [group.has_layers for group in engine.core.scheduler.config.groups] == [has_layers, True]
        found.append(run(engine))
        engine.shutdown()
    assert found[0] == found[1]
