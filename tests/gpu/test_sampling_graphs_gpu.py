"""Sampling on a GPU: logits processors and logprobs against a CPU, graphs against eager steps, no synchronisation."""

from array import array
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.engines import drain, make_engine
from tests.helpers.kernels import triton_kernels, waits_are_errors
from tests.helpers.logits_processor_cases import processor_case
from tests.helpers.schedules import assert_agree, live, random_lives
from tests.unit.test_logprobs import check_kernels

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.kernels.sampling.logits_processors import process_logits_cpu
from fleetfoot.kernels.sampling.logits_processors_triton import process_logits_triton
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import NewRequest
from fleetfoot.runner.v2.device import open_device
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.sampling.sampler_v2 import Sampler, SamplerOutput
from fleetfoot.sampling.shape import EVERYTHING, LIST_CAPACITY, SamplingVariant
from fleetfoot.sampling.verification import DraftVerification, LogitsBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]

VOCAB = 151936


@pytest.mark.parametrize("seed", range(20))
def test_logits_processors_are_bitwise_those_of_a_cpu(seed: int) -> None:
    case = processor_case(seed, vocab_size=200, num_rows=12)
    moved, real = case.to("cuda"), case.rows >= 0
    found = process_logits_triton(moved.logits, moved.rows, moved.seq_lens, moved.tables).cpu()
    assert torch.equal(found[real], process_logits_cpu(case.logits, case.rows, case.seq_lens, case.tables)[real])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab_size", [5, 2049, VOCAB])
def test_logprobs_are_those_of_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    check_kernels(vocab_size, dtype, "cuda")


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"temperature": 0.7, "frequency_penalty": -1.3, "logprobs": 20},
    {"temperature": 1.0, "logit_bias": {97 * token: token % 9 - 4.0 for token in range(LIST_CAPACITY - 9)}},
    {"temperature": 1.0, "allowed_token_ids": list(range(5, VOCAB, 1000)), "logprobs": 0},
    {"temperature": 0.0, "min_tokens": 60},
    {"temperature": 0.6, "min_p": 0.1, "repetition_penalty": 0.8, "logit_bias": {7: 30.0}, "logprobs": 3},
]


def rows_of_requests() -> tuple[Sampler, LogitsBatch]:
    """Nine requests in their rows, in another order in the batch, behind which there is padding."""
    kernels = triton_kernels()
    sizes = {"max_num_seqs": 16, "max_model_len": 128, "num_blocks": 80, "max_num_batched_tokens": 2048}
    state = DeviceState(open_device(torch.device("cuda"), kernels), block_size=16, vocab_size=VOCAB, **sizes)
    verification = DraftVerification(state.tables, kernels.accept_drafts)
    sampler = Sampler(state.sampling, verification, kernels, lambda hidden: hidden, VOCAB, is_as_captured=True)
    state.staging.begin()
    rng = np.random.default_rng(0)
    lengths = [20 + 9 * row for row in range(len(PARAMS))]
    for row, features in enumerate(PARAMS):
        tokens = rng.integers(0, 300, lengths[row]).tolist()
        blocks, params = list(range(8 * row, 8 * row + 8)), SamplingParams(max_tokens=99, **features)
        stop, bad_words = frozenset({3, 150000}), [[*tokens[-2:], 8], [9]] if row % 2 else []
        lists = blocks, params, row * 12345, stop, bad_words
        request = NewRequest(str(row), row, array("i", tokens), 10 + row, 0, *lists)
        state.stage_request(request)
        sampler.add(request)
    order = [4, 0, 8, 2, 6, 1, 3, 7, 5]
    state.staging.apply_staged_writes(order, np.arange(17, dtype=np.int32), 16)
    padded = [*(lengths[row] for row in order), *[0] * 7], [*order, *[-1] * 7]
    seq_lens, rows = torch.tensor(padded, dtype=torch.int32, device="cuda")
    return sampler, LogitsBatch(None, rows, seq_lens, rows, 16, 0)


def assert_same_rows(got: SamplerOutput, expected: SamplerOutput, rows: torch.Tensor) -> None:
    real = rows >= 0
    assert torch.equal(got.token_ids[real], expected.token_ids[real])
    assert not got.invalid[real].any() and not expected.invalid[real].any()
    counts = [PARAMS[row].get("logprobs") if row >= 0 else None for row in rows.tolist()]
    assert got.logprobs is not None and expected.logprobs is not None
    found, wanted = (output.logprobs.to_rows([count or 0 for count in counts]) for output in (got, expected))
    for count, row, other in zip(counts, found, wanted, strict=True):
        assert count is None or row == other


def test_a_graph_samples_what_an_eager_step_does_and_a_row_what_it_does_alone() -> None:
    sampler, batch = rows_of_requests()
    assert sampler.fits_graph
    assert sampler.variant == EVERYTHING
    logits = torch.randn(16, VOCAB, device="cuda").mul_(4).to(torch.bfloat16)
    device = open_device(torch.device("cuda"), triton_kernels())
    with torch.inference_mode():
        graph = device.capture(lambda: sampler.sample(logits, batch, EVERYTHING), nullcontext())
        for step in range(5):
            logits.copy_(torch.randn(16, VOCAB, device="cuda").mul_(3 + step))
            with waits_are_errors():
                expected = sampler.sample(logits, batch, EVERYTHING)
                graph.replay()
            assert_same_rows(graph.output, expected, batch.rows)
            for index in range(9):
                one = slice(index, index + 1)
                row, seq_len = batch.rows[one], batch.seq_lens[one]
                alone = sampler.sample(logits[one], LogitsBatch(None, row, seq_len, row, 1, 0), EVERYTHING)
                assert alone.token_ids[0] == expected.token_ids[index]
            few = sampler.sample(logits, batch, SamplingVariant(filters=True, other_filters=True))
            plain = [index for index, row in enumerate(batch.rows.tolist()) if 0 <= row <= 2]
            assert torch.equal(few.token_ids[plain], expected.token_ids[plain])


def engine(**changes: Any) -> LLMEngine:
    limits: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 256}
    settings: dict[str, Any] = {"block_size": 16, "dtype": "float32", "max_model_len": 80, "skip_tokenizer_init": True}
    return make_engine(embedded_model_path(), device="cuda", **settings, **{**limits, **changes})


def graphs_of(engine: LLMEngine) -> Any:
    return engine.core.executor.runner.graphs  # type: ignore[attr-defined]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "ngram"])
@pytest.mark.parametrize("seed", [4, 5, 6])  # with decodes in several sampling variants
def test_random_requests_in_graphs(seed: int, drafts: bool) -> None:
    lives = random_lives(seed, 2048)
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False} if drafts else None
    captured = engine(model_runner="v2", speculative_config=speculative)
    outputs = live(captured, lives)
    assert graphs_of(captured).num_steps["uniform" if drafts else "decode"] > 0
    captured.shutdown()
    eager = engine(model_runner="v2", enforce_eager=True)
    expected = live(eager, lives)
    eager.shutdown()
    for life in lives:
        assert_agree(outputs[life.request_id], expected[life.request_id], tolerance=1e-3)


def test_no_step_of_decodes_ends_with_its_forward_pass() -> None:
    """Every sampling parameter is in graphs."""
    tried = engine(model_runner="v2")
    graphs = graphs_of(tried)
    biased = {"logit_bias": {5: 1.0}, "top_p": 0.9, "min_tokens": 9}
    for number, features in enumerate(({}, {"repetition_penalty": 1.2, "logprobs": 5}, biased)):
        params = SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False, **features)
        tried.add_request(str(number), [7, 8, 9], params)
    drain(tried)
    assert graphs.num_steps["decode"] >= 29
    assert graphs.num_steps["eager"] == 0
    tried.shutdown()
