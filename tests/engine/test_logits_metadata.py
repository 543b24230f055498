"""`LogitsMetadata`: K and V of all tokens, but hidden states only of the rows that are read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.kernels import cpu_kernels, reference_kernels
from tests.helpers.paged_models import PagedCache, context, logits_metadata
from tests.helpers.runner_lives import STORY

from fleetfoot.config.parsing import load_model_config
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.fusion.decoder import fuse
from fleetfoot.records.forward_context import ForwardContext
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.weights.loading import ModelLoader

ROWS = {
    "none": ([], []),
    "the last of each": ([0, 3, 9, 18], [0, 1, 2, 3, 4]),
    "the last of some": ([0, 3], [0, 1, 2]),
    "every token of a request with drafts": ([0, 1, 2, 3, 9], [0, 1, 4, 5]),
}
"""``LogitsMetadata.indices``, and where the queries of its requests begin."""


@pytest.mark.parametrize("ops", [reference_kernels(), cpu_kernels()], ids=["torch", "native"])
@pytest.mark.parametrize(
    ("model_type", "fields"), [("llama", {}), ("mistral", {"sliding_window": 7}), ("qwen3", {"num_hidden_layers": 1})]
)
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_model_returns_the_rows_that_are_read(
    rows: str, is_fused: bool, model_type: str, fields: dict[str, Any], ops: Any, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, model_type, **fields)
    config, ctx = load_model_config(tmp_path), context(ops=ops)
    model = ModelLoader(config, ctx, tmp_path).load()
    if is_fused:
        fuse(model.model.layers, ctx, [True] * config.num_layers)
    cache = PagedCache(config, block_size=4)
    computed = {number: [1] * length for number, length in enumerate((8, 10, 0, 11))}
    cache.step({number: tokens for number, tokens in computed.items() if tokens})
    new = torch.randint(0, 80, (19,), generator=torch.Generator().manual_seed(1)).split([1, 3, 6, 9])
    ids, step = cache.step({number: tokens.tolist() for number, tokens in enumerate(new)})
    before = [torch.randn(kv.shape, generator=torch.Generator().manual_seed(i)) for i, kv in enumerate(step.kv_caches)]
    caches, narrow_caches = ([kv.clone() for kv in before] for _ in range(2))
    indices, starts = ROWS[rows]
    every = model(ids, ForwardContext(step.attention, caches))
    some = model(ids, ForwardContext(step.attention, narrow_caches, logits_metadata(step.attention, indices, starts)))
    assert isinstance(every, torch.Tensor) and isinstance(some, torch.Tensor)
    assert some.shape == (len(indices), config.hidden_size)
    torch.testing.assert_close(some, every[indices], rtol=1e-4, atol=1e-5)
    for kv, narrow_kv, old in zip(caches, narrow_caches, before, strict=True):
        torch.testing.assert_close(narrow_kv, kv, rtol=1e-4, atol=1e-5)
        assert not torch.equal(kv, old)


def count_mlp_rows(engine: LLMEngine, index: int) -> list[int]:
    """Number of tokens that reach the MLP of a fused layer, for each step from now on."""
    (run,) = engine.core.executor.runner._model.model.layers._runs  # type: ignore[attr-defined]
    run._chain = None  # not in one call of C, so that the layers can be observed
    output, steps = run._by_layer[index][-1].output, []
    add = output.add

    def counted(x: torch.Tensor, *others: Any) -> torch.Tensor:
        steps.append(len(x))
        return add(x, *others)

    output.add = counted
    return steps


PROMPTS = {"long": list(range(300, 340)), "short": list(range(300, 305))}


def count_rows(options: dict[str, Any], **keywords: Any) -> tuple[list[int], list[int]]:
    """Tokens that reach the first and the last layer's MLP, step by step: prompts of 40 and of 5, 16 tokens a step."""
    keywords |= {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128}
    engine = make_engine(STORY, use_v2_model_runner=True, **keywords)
    first, last = count_mlp_rows(engine, 0), count_mlp_rows(engine, -1)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, **options)
    run_requests(engine, {name: ({"prompt_token_ids": ids}, params) for name, ids in PROMPTS.items()})
    engine.shutdown()
    return first, last


def test_the_last_layer_of_a_chunk_inside_a_prompt_computes_only_k_and_v() -> None:
    first, last = count_rows({})
    # Two chunks of 16 of which nothing is read; the third, of 8 and the short prompt, ends both; then decodes.
    assert first == [16, 16, 13, 2, 2]
    assert last == [2, 2, 2]


def test_prompt_logprobs_read_every_token() -> None:
    first, last = count_rows({"prompt_logprobs": 0})
    assert last == first
    assert sum(last) == 40 + 5 + 2 * 2
