"""Decoder layers in two CUDA kernels, in engines: tokens, graphs, starts without the kernels, weights that change."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import make_engine, prompt_of, run_requests

from fleetfoot import SamplingParams
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.kernels.runtime import cuda_source
from fleetfoot.kernels.runtime.cuda_source import LoadedKernel
from fleetfoot.kernels_hopper.cluster import fit
from fleetfoot.kernels_hopper.cluster.layer_blocks import ATTENTION_BLOCK, MLP_BLOCK
from fleetfoot.plan.machine import Machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and Machine.detect().is_hopper and Machine.detect().has_nvrtc),
        reason="needs a Hopper GPU, and NVRTC",
    ),
]

KERNELS = {ATTENTION_BLOCK, MLP_BLOCK}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
SHAPE: dict[str, Any] = {**SIZES, "head_dim": 128, "vocab_size": 512, "num_hidden_layers": 3}
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
BATCHES = [(1,), (40,), (5, 130), (9, 17, 33), (1, 2, 3, 4), (20, 21, 22, 23, 24, 25, 26)]
"""Lengths of prompts that run together."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp(f"layers{seed}") for seed in range(2)]
    for seed, folder in enumerate(made):
        make_checkpoint(folder, "qwen3", seed=seed, dtype=torch.bfloat16, **SHAPE)
    return made


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """They are used for up to 8 rows; the names of those of two a layer that were launched, eagerly or in a capture."""
    monkeypatch.setattr(fit, "MOST_ROWS", 8)
    names: list[str] = []
    launch = LoadedKernel.launch

    def counted(kernel: LoadedKernel, *arguments: Any, **options: Any) -> None:
        if kernel._kernel.function in KERNELS:
            names.append(kernel._kernel.function)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(LoadedKernel, "launch", counted)
    cuda_source._function.cache_clear()
    yield names


def engine(folder: Path, **settings: Any) -> LLMEngine:
    limits: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 256}
    limits |= {"dtype": "bfloat16", "max_model_len": 256, **settings}
    return make_engine(folder, device="cuda", skip_tokenizer_init=True, **limits)


def outputs(made: LLMEngine) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Tokens and logprobs of each request."""
    results = []
    for lengths in BATCHES:
        requests = {str(length): (prompt_of(length, 500, seed=length), PARAMS) for length in lengths}
        done = run_requests(made, requests)
        for name in requests:
            output = done[name].outputs[0]
            logprobs = [{token: entry.logprob for token, entry in step.items()} for step in output.logprobs or []]
            results.append((output.token_ids, logprobs))
    return results


def assert_near(got: Any, expected: Any) -> None:
    """The same tokens, up to one that is nearly as probable as the expected one."""
    for (tokens, logprobs), (others, expected_logprobs) in zip(got, expected, strict=True):
        for token, other, here, there in zip(tokens, others, logprobs, expected_logprobs, strict=True):
            for each in here.keys() & there.keys():
                assert abs(here[each] - there[each]) < 0.3
            if token != other:
                assert there[other] - there.get(token, min(there.values())) < 0.3
                break


def test_tokens_graphs_and_weights(folders: list[Path], launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, eager steps and an engine with other weights have the tokens of the other path, up to near-ties."""
    made = engine(folders[0])
    assert made.plan.kernels["layer_chain"] == "cuda" and made.plan.layer_chain.max_rows == 8
    with_graphs = outputs(made)
    graphs = made.core.executor.runner.graphs  # type: ignore[attr-defined]
    assert graphs.num_steps["decode"] > 0 and {*launched} == KERNELS
    made.reload_weights(folders[1])
    reloaded = outputs(made)
    made.shutdown()
    launched.clear()
    eager = engine(folders[0], enforce_eager=True)
    assert_near(outputs(eager), with_graphs)
    assert launched
    eager.shutdown()
    launched.clear()
    monkeypatch.setattr(fit, "MOST_ROWS", 0)
    for folder, found in zip(folders, (with_graphs, reloaded), strict=True):
        plain = engine(folder)
        assert plain.plan.kernels["layer_chain"] == "triton"
        assert_near(found, outputs(plain))
        plain.shutdown()
    assert not launched


def test_contexts_that_grow_change_to_the_other_path(
    folders: list[Path], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "MOST_POSITIONS", 50)
    made = engine(folders[0])
    found = outputs(made)
    keys = made.core.executor.runner.graphs.captured  # type: ignore[attr-defined]
    assert {key.shape.max_context for key in keys if key.shape.kind == "decode" and key.shape.num_reqs == 1} == {0, 50}
    made.shutdown()
    assert {*launched} == KERNELS
    launched.clear()
    eager = engine(folders[0], enforce_eager=True)
    assert_near(outputs(eager), found)
    assert launched
    eager.shutdown()
    monkeypatch.setattr(fit, "MOST_ROWS", 0)
    plain = engine(folders[0])
    assert_near(found, outputs(plain))
    plain.shutdown()


def test_kernels_that_do_not_fit_are_not_used(
    folders: list[Path], launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(folders[0])
    expected = outputs(made)
    made.shutdown()
    launched.clear()
    monkeypatch.setattr(LoadedKernel, "fits", property(lambda _: False, lambda *_: None))
    cuda_source._function.cache_clear()
    made = engine(folders[0])
    assert_near(outputs(made), expected)
    made.shutdown()
    assert not launched


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"model_runner": "v1"}], ids=str)
def test_others_take_the_other_path(folders: list[Path], launched: list[str], settings: dict[str, Any]) -> None:
    made = engine(folders[0], **settings)
    outputs(made)
    made.shutdown()
    assert not launched
