"""`LogitsMetadata`: K and V of all tokens, but hidden states only of the rows that are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.draft_matrix import METHODS, STORY
from tests.helpers.engines import make_engine, run_requests
from tests.helpers.kernels import cpu_kernels, reference_kernels

from fleetfoot.config.parsing import load_model_config
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.fusion.decoder import fuse
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.layers.context import ModelContext
from fleetfoot.records.forward_context import AttentionMetadata, ForwardContext, LogitsMetadata
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.weights.loading import ModelLoader

BLOCK_SIZE = 4
QUERY_LENS, SEQ_LENS = (1, 3, 6, 9), (9, 13, 6, 20)
STARTS = (0, 1, 4, 10, 19)
ROWS = {
    "none": ([], []),
    "the last of each": ([0, 3, 9, 18], [0, 1, 2, 3, 4]),
    "the last of some": ([0, 3], [0, 1, 2]),
    "every token of a request with drafts": ([0, 1, 2, 3, 9], [0, 1, 4, 5]),
}


def batch_metadata() -> AttentionMetadata:
    """Of four requests, each with seven blocks of its own."""
    tables = torch.arange(28, dtype=torch.int32).flip(0).view(4, 7)
    positions = [range(end - count, end) for count, end in zip(QUERY_LENS, SEQ_LENS, strict=True)]
    slots = [
        int(tables[row, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE
        for row, places in enumerate(positions)
        for place in places
    ]
    return AttentionMetadata(
        query_start_loc=torch.tensor(STARTS, dtype=torch.int32),
        seq_lens=torch.tensor(SEQ_LENS, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        positions=torch.tensor([place for places in positions for place in places]),
        num_decodes=1,
        max_query_len=9,
        max_seq_len=20,
    )


def logits_metadata(indices: list[int], starts: list[int]) -> LogitsMetadata:
    metadata = batch_metadata()
    count = max(len(starts) - 1, 0)
    return LogitsMetadata(
        torch.tensor(indices, dtype=torch.int64),
        AttentionMetadata(
            query_start_loc=torch.tensor(starts or [0], dtype=torch.int32),
            seq_lens=metadata.seq_lens[:count],
            block_tables=metadata.block_tables[:count],
            slot_mapping=metadata.slot_mapping[:0],
            positions=metadata.positions[:0],
            num_decodes=0 if len(indices) > count else count,
            max_query_len=3 if len(indices) > count else 1,
            max_seq_len=20,
        ),
    )


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
    config = load_model_config(tmp_path)
    context = ModelContext(ops=ops, attention=SDPABackend(), dtype=torch.float32, device=torch.device("cpu"))
    model = ModelLoader(config, context, tmp_path).load()
    if is_fused:
        fuse(model.model.layers, context, [True] * config.num_layers)
    metadata = batch_metadata()
    ids = torch.randint(0, 80, (19,), generator=torch.Generator().manual_seed(1))
    shape = (28, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    before = [torch.randn(shape, generator=torch.Generator().manual_seed(layer)) for layer in range(config.num_layers)]
    caches, narrow_caches = ([cache.clone() for cache in before] for _ in range(2))
    indices, starts = ROWS[rows]
    every = model(ids, ForwardContext(metadata, caches))
    some = model(ids, ForwardContext(metadata, narrow_caches, logits_metadata(indices, starts)))
    assert isinstance(every, torch.Tensor) and isinstance(some, torch.Tensor)
    assert some.shape == (len(indices), config.hidden_size)
    torch.testing.assert_close(some, every[indices], rtol=1e-4, atol=1e-5)
    for cache, narrow_cache, old in zip(caches, narrow_caches, before, strict=True):
        torch.testing.assert_close(narrow_cache, cache, rtol=1e-4, atol=1e-5)
        assert not torch.equal(cache, old)


class RowCount:
    """Counts the tokens that reach the MLP of a fused layer."""

    def __init__(self, engine: LLMEngine, index: int) -> None:
        model = engine.core.executor._worker.runner._model  # type: ignore[attr-defined]
        (run,) = model.model.layers._runs
        layer = run._layers[index]
        self._down = layer._down
        self.steps: list[int] = []
        layer._down = self

    def __call__(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        self.steps.append(len(x))
        return self._down(x, *others)


PROMPTS = {"long": list(range(300, 340)), "short": list(range(300, 305))}


def count_rows(options: dict[str, Any], **keywords: Any) -> tuple[list[int], list[int]]:
    """Tokens that reach the first and the last layer's MLP, step by step: prompts of 40 and of 5, 16 tokens a step."""
    keywords |= {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 128}
    engine = make_engine(STORY, use_v2_model_runner=True, **keywords)
    first, last = RowCount(engine, 0), RowCount(engine, -1)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, **options)
    run_requests(engine, {name: ({"prompt_token_ids": ids}, params) for name, ids in PROMPTS.items()})
    engine.shutdown()
    return first.steps, last.steps


def test_the_last_layer_of_a_chunk_inside_a_prompt_computes_only_k_and_v() -> None:
    first, last = count_rows({})
    # Two chunks of 16 of which nothing is read; the third, of 8 and the short prompt, ends both; then decodes.
    assert first == [16, 16, 13, 2, 2]
    assert last == [2, 2, 2]


def test_prompt_logprobs_read_every_token() -> None:
    first, last = count_rows({"prompt_logprobs": 0})
    assert last == first
    assert sum(last) == 40 + 5 + 2 * 2


@pytest.mark.parametrize(("method", "reads_all"), [("eagle", True), ("draft_model", False), ("ngram", False)])
def test_only_eagle_reads_every_token(method: str, reads_all: bool) -> None:
    first, last = count_rows({}, speculative_config=METHODS[method])
    assert (last == first) == reads_all
    if not reads_all:
        assert sum(first) - sum(last) == 16 + 16 + 8 - 1 + 5 - 1
