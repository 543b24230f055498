"""What is imported when, and which module reads the environment."""

import ast
import ctypes
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import fleetfoot
from fleetfoot.config.env import NATIVE_VARIANT, USE_NATIVE_KERNELS, native_variant, use_native_kernels
from fleetfoot.native.loading import VARIANTS, native_problem, open_library, supported_variants
from fleetfoot.plan.machine import Machine

HEAVY = {"torch", "numpy", "tokenizers", "transformers", "safetensors", "huggingface_hub", "jinja2", "rich", "asyncio"}
PLAIN_NAMES = "SamplingParams, RequestOutputKind, RequestOutput, CompletionOutput, TokensPrompt, EngineConfig"
LOWER_ROOMS = """
import importlib, pkgutil
for name in ("fleetfoot.config", "fleetfoot.records", "fleetfoot.scheduler"):
    package = importlib.import_module(name)
    found = [module.name for module in pkgutil.iter_modules(package.__path__, name + ".")]
    assert len(found) > 3, found
    for module in found:
        importlib.import_module(module)
"""


def modules_after(code: str) -> set[str]:
    """The top-level modules of a fresh interpreter after running ``code``."""
    script = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import fleetfoot; fleetfoot.__version__; dir(fleetfoot)", HEAVY),
        (
            f"from fleetfoot import {PLAIN_NAMES}\nSamplingParams(temperature=0.5)\nEngineConfig()",
            {"torch", "numpy", "tokenizers"},
        ),
        (LOWER_ROOMS, {"torch", "numpy", "tokenizers", "transformers", "safetensors"}),
        ("import fleetfoot.server.serve", {"torch", "transformers", "safetensors"}),  # an API server beside its engine
        (
            "from fleetfoot import LLM, AsyncLLM",
            {"torch", "transformers", "safetensors"},
        ),  # its workers may be processes
    ],
    ids=["the package", "plain names", "lower rooms", "an API server", "an engine"],
)
def test_what_is_not_imported(code: str, absent: set[str]) -> None:
    assert not modules_after(code) & absent


@pytest.mark.slow
def test_token_ids_need_torch_numpy_safetensors_and_msgspec_alone() -> None:
    """With every other dependency missing, an engine still starts and generates."""
    code = """
missing = ("tokenizers", "huggingface_hub", "jinja2", "rich", "transformers")
sys.modules.update(dict.fromkeys(missing))
from fleetfoot import LLM, SamplingParams
from fleetfoot.assets import embedded_model_path
with LLM(embedded_model_path(), skip_tokenizer_init=True, device="cpu", max_num_seqs=1) as llm:
    (output,) = llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.outputs[0].token_ids
for name in missing:
    del sys.modules[name]

import torch
from fleetfoot.config.parsing import load_model_config
from fleetfoot.kernels.registry import DeviceFacts, load_kernels, plan_kernels
from fleetfoot.layers.context import ModelContext
from fleetfoot.weights.loading import ModelLoader
ops = load_kernels(plan_kernels(DeviceFacts("cpu")))
context = ModelContext(ops, ops.attention, torch.float32, torch.device("cpu"))
folder = embedded_model_path()
ModelLoader(load_model_config(folder), context, folder, layers=range(1)).load()  # as a rank of a pipeline
"""
    loaded = modules_after(code)
    assert "torch" in loaded
    assert "sympy" not in loaded  # torch's compiler imports it, which takes a second


def test_every_public_name_is_there() -> None:
    for name in fleetfoot.__all__:
        assert getattr(fleetfoot, name) is not None
    assert dir(fleetfoot) == sorted(fleetfoot.__all__)
    with pytest.raises(AttributeError, match="module 'fleetfoot' has no attribute 'Nothing'"):
        fleetfoot.Nothing  # noqa: B018


PACKAGE = Path(fleetfoot.__file__).parent
READER = PACKAGE / "config" / "env.py"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MENTIONS = re.compile("|".join([*NAMES, r"from\s+os\s", "FLEETFOOT_USE_V2_MODEL_RUNNER", "use_v2_model_runner"]))


def environment_uses(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines that touch the environment: ``os.environ``, ``os.getenv`` and their like, however ``os`` was imported."""
    found = set()
    for node in nodes:
        names: set[str] = set()
        if isinstance(node, ast.Attribute):
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name.replace("*", "environ") for alias in node.names}
        if names & NAMES:
            found.add(node.lineno)
    return sorted(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\nx = os.environ['A']", [2]),
        ("import os\nx = os.getenv('A')", [2]),
        ("import os as o\nx = o.environ.get('A')", [2]),
        ("from os import environ", [1]),
        ("from os import getenv as g", [1]),
        ("from os import *", [1]),
        ("def f():\n    import os\n    return 'A' in os.environ", [3]),
        ("import os\nos.putenv('A', 'b')", [2]),
        ("environ = {}\nx = environ['A']", []),
        ("import os\nos.path.join('a')", []),
        ("x = 'environ'", []),
    ],
)
def test_the_search_for_readers(source: str, lines: list[int]) -> None:
    assert environment_uses(ast.walk(ast.parse(source))) == lines


def test_one_module_reads_the_environment() -> None:
    """And one function the variable of the runner; elsewhere its name stands in messages."""
    assert len(SOURCES) > 100
    readers, callers = [], []
    for path in SOURCES:
        if not MENTIONS.search(text := path.read_text()):
            continue  # all together take seconds to be parsed
        nodes = list(ast.walk(ast.parse(text)))
        if environment_uses(nodes):
            readers.append(path)
        for node in nodes:
            if isinstance(node, ast.Constant) and node.value == "FLEETFOOT_USE_V2_MODEL_RUNNER":
                assert path == READER, f"{path}:{node.lineno}"
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == "use_v2_model_runner":
                callers.append(str(path.relative_to(PACKAGE)))
    assert readers == [READER]
    assert callers == ["plan/oracle.py"]


def test_the_c_kernels_can_be_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USE_NATIVE_KERNELS, "0")
    assert native_problem() == "FLEETFOOT_USE_NATIVE_KERNELS=0 excludes them"
    monkeypatch.setenv(USE_NATIVE_KERNELS, "1")
    assert use_native_kernels() and "excludes" not in native_problem()
    monkeypatch.setenv(USE_NATIVE_KERNELS, "no")
    with pytest.raises(ValueError, match="FLEETFOOT_USE_NATIVE_KERNELS is 'no'; it can be 0, 1 or unset"):
        use_native_kernels()
    monkeypatch.setenv(USE_NATIVE_KERNELS, "0")
    assert "excludes" in native_problem()  # also once the library is open


def test_an_instruction_set_that_is_slower_than_a_lesser_one_is_last() -> None:
    levels = {b"avx512_bf16": 2, b"avx512": 1, b"avx2": 1, b"sse4": 0}
    library = SimpleNamespace(ff_supports=lambda name: levels[name])
    for name in levels:
        setattr(library, f"ff_{name.decode()}_rms_norm", None)
    assert supported_variants(cast(ctypes.CDLL, library)) == ("avx512", "avx2", "avx512_bf16")


def test_the_instruction_set_of_the_c_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NATIVE_VARIANT, "v4")
    with pytest.raises(ValueError, match=r"FLEETFOOT_NATIVE_VARIANT is 'v4'; it can be amx, .* or unset"):
        native_variant(VARIANTS)
    monkeypatch.delenv(NATIVE_VARIANT)
    if native_problem():
        pytest.skip("needs the C library")
    supported = supported_variants(open_library())
    assert Machine.without_gpu().native_variant == supported[0]
    for name in VARIANTS:
        monkeypatch.setenv(NATIVE_VARIANT, name)
        machine = Machine.without_gpu()
        there = ", ".join(supported)
        problem = "" if name in supported else f"{NATIVE_VARIANT} is {name!r}, and this processor runs {there}"
        assert (machine.native_variant, machine.native_problem) == (None if problem else name, problem)


def test_a_wheel_is_for_every_python_of_a_platform() -> None:
    script = """
import setuptools, distutils.core
wheel = distutils.core.run_setup("setup.py", stop_after="init").get_command_obj("bdist_wheel")
wheel.ensure_finalized()
print(*wheel.get_tag()[:2])
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.split() == ["py3", "none"]


def test_tests_of_gpus_can_be_imported() -> None:
    """They are not collected where there is no GPU."""
    for path in sorted((Path(__file__).parents[1] / "gpu").glob("test_*.py")):
        importlib.import_module(f"tests.gpu.{path.stem}")
