"""Starts with no kernel in the cache, one for every kind of engine, each in a process of its own. After the start,
nothing is compiled, captured or loaded, whatever is served.

With pytest-xdist they run side by side: ``pytest tests/gpu/test_cold_start_gpu.py -n 8``. Tokens are those of the same
engine that compiles or loads each kernel when it is launched, where steps do not depend on time; else those of a CPU.

Kinds have most kernels in common. All but ``COLDEST`` compile each of them once: see `tests.helpers.shared_kernels`.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tests.helpers.kv_pair import skip_without
from tests.helpers.prefill_decode import nixl

from fleetfoot.assets import embedded_model_path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LLAMA = embedded_model_path()
REPOSITORY = Path(__file__).parent.parent.parent
ASSETS = REPOSITORY / "tests" / "assets"
LIMIT = 420
"""Seconds until a start counts as hanging."""
FOLDER = "the test's own folder"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
DRAFT = {**NGRAM, "method": "draft_model", "model": str(ASSETS / "story-draft")}
EAGLE = {"method": "eagle", "num_speculative_tokens": 2, "adaptive": False}
FILES = {
    "kv_connector": "SharedStorageConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": FOLDER},
}


@dataclass(frozen=True)
class Kind:
    """A kind of engine."""

    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    tokens: str | None = "lazily"
    """``lazily``, ``cpu``, or None where they are not compared."""
    model: Path = LLAMA
    num_gpus: int = 1


KINDS = {
    "plain": Kind(),
    "qwen3": Kind(model=ASSETS / "story-qwen3"),
    "mistral": Kind(model=ASSETS / "story-mistral"),
    "eager": Kind({"enforce_eager": True}),
    "float16": Kind(dtype="float16"),
    "float32": Kind(dtype="float32", tokens="cpu"),
    "ngram": Kind({"speculative_config": NGRAM}),
    "draft model": Kind({"speculative_config": DRAFT}),
    "eagle": Kind({"speculative_config": EAGLE}),
    "ngram, float32": Kind({"speculative_config": NGRAM}, "float32", "cpu"),
    "eagle, float32": Kind({"speculative_config": EAGLE}, "float32", "cpu"),
    "ngram, eager": Kind({"speculative_config": NGRAM, "enforce_eager": True}),
    "files": Kind({"kv_transfer_config": FILES}, "float32", "cpu"),
    "files, ngram": Kind({"kv_transfer_config": FILES, "speculative_config": NGRAM}, "float32", "cpu"),
    "offloading": Kind({"kv_offloading_size": 0.1}, "float32", "cpu"),
    "nixl": Kind({"kv_transfer_config": nixl("kv_both", backend="nixl")}, "float32", "cpu"),
    "grammars": Kind({"skip_tokenizer_init": False}),
    "grammars, ngram": Kind({"skip_tokenizer_init": False, "speculative_config": NGRAM}),
    "sleep": Kind({"enable_sleep_mode": True}),
    "v1": Kind({"model_runner": "v1"}, "float32", "cpu"),
    "v1, ngram": Kind({"model_runner": "v1", "speculative_config": NGRAM}, "float32", "cpu"),
    "tensor ranks": Kind({"tensor_parallel_size": 2}, "float32", "cpu", num_gpus=2),
    "tensor ranks, bfloat16": Kind({"tensor_parallel_size": 2}, tokens=None, num_gpus=2),
    "tensor ranks, eagle": Kind({"tensor_parallel_size": 2, "speculative_config": EAGLE}, "float32", "cpu", num_gpus=2),
    "pipeline": Kind({"pipeline_parallel_size": 2}, "float32", "cpu", num_gpus=2),
    "pipeline, bfloat16": Kind({"pipeline_parallel_size": 2}, tokens=None, num_gpus=2),
    "pipeline, ngram": Kind({"pipeline_parallel_size": 2, "speculative_config": NGRAM}, "float32", "cpu", num_gpus=2),
}


COLDEST = ("plain", "float16", "float32", "draft model")
"""Kinds that compile all of their kernels."""


@pytest.fixture
def sharing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for a start of a kind, which shares what it compiles with those in other processes of pytest-xdist."""
    if request.node.callspec.params["name"] in COLDEST:
        return {}
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    return {
        "SHARED_KERNELS": str(folder / "shared-kernels"),
        "TRITON_CACHE_MANAGER": "tests.helpers.shared_kernels:SharedKernels",
    }


def start(
    how: str, settings: dict[str, Any], folder: Path, cache: str = "cache", **variables: str
) -> tuple[dict[str, Any], str]:
    """What `tests.helpers.cold_start` reports, with a cache that is empty at first, and its stderr."""
    folder.mkdir(exist_ok=True)
    text = json.dumps({"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 400, **settings})
    paths = [str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(folder / cache),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONFAULTHANDLER": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    arguments = [sys.executable, "-m", "tests.helpers.cold_start", how, text.replace(FOLDER, str(folder / "kv"))]
    # Files, not pipes, which processes of the engine would hold open if it ended badly.
    with (folder / "stdout").open("w+") as stdout, (folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            arguments, cwd=REPOSITORY, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            code: int | str = process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            code = f"none after {LIMIT} s"
            os.killpg(process.pid, signal.SIGABRT)  # on which Python prints where each thread is
            process.wait()
        with suppress(ProcessLookupError):  # nothing is left, as it should be
            os.killpg(process.pid, signal.SIGKILL)
        stdout.seek(0), stderr.seek(0)
        printed, errors = stdout.read(), stderr.read()
    description = f"{how} {text}: exit code {code}\n--- stdout\n{printed[-4000:]}\n--- stderr\n{errors}"
    if code != 0 or not printed.strip():
        pytest.fail(description, pytrace=False)
    return json.loads(printed.splitlines()[-1]), description


@cache
def tokens_of_a_cpu(model: Path) -> dict[str, list[int]]:
    settings = {
        "model": str(model),
        "device": "cpu",
        "dtype": "float32",
        "model_runner": "v1",
        "skip_tokenizer_init": True,
    }
    with TemporaryDirectory() as folder:
        tokens: dict[str, list[int]] = start("lazily", settings, Path(folder))[0]["tokens"]
    return tokens


def settings_of(kind: Kind) -> dict[str, Any]:
    own = {"model": str(kind.model), "dtype": kind.dtype, **kind.settings}
    return {"device": "cuda", "model_runner": "v2", "num_gpu_blocks_override": 1024, "skip_tokenizer_init": True, **own}


@pytest.mark.parametrize("name", KINDS)
def test_a_cold_start_serves(name: str, tmp_path: Path, sharing: dict[str, str]) -> None:
    kind = KINDS[name]
    if torch.cuda.device_count() < kind.num_gpus:
        pytest.skip(f"needs {kind.num_gpus} CUDA devices")
    if name == "nixl":
        skip_without("nixl")
    settings = settings_of(kind)
    report, output = start("ahead", settings, tmp_path, **sharing)
    assert report["runner"] == settings["model_runner"], output
    assert report["threads"] == [], output
    if settings["model_runner"] == "v2" and kind.num_gpus == 1:
        # imports take seconds: see `fleetfoot.kernels.runtime.dry_tensors`
        assert (report["late"], report["imports"]) == ([], []), output
        assert sum(report["kernels"]) > 5, output
    if kind.tokens is not None:
        if kind.tokens == "lazily":
            expected = start("lazily", settings, tmp_path, **sharing)[0]["tokens"]
        else:
            expected = tokens_of_a_cpu(kind.model)
        pairs = {key: (report["tokens"].get(key), tokens) for key, tokens in expected.items()}
        different = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        assert not different, f"{len(different)} of {len(pairs)} requests: {different}\n{output}"


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    settings = settings_of(KINDS["qwen3"])
    cold, warm = (start("ahead", settings, tmp_path)[0] for _ in range(2))
    assert (cold["late"], warm["late"], cold["threads"], warm["threads"]) == ([], [], [], [])
    (found, compiled), (found_again, compiled_again) = cold["kernels"], warm["kernels"]
    assert (found, compiled > 15) == (0, True)
    assert (found_again, compiled_again) == (compiled, 0)
    assert cold["tokens"] == warm["tokens"]
