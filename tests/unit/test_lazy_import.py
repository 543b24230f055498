"""What is imported when: `import fleetfoot` costs next to nothing, and the lower floors need no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fleetfoot

HEAVY = {"torch", "numpy", "tokenizers", "transformers", "safetensors", "huggingface_hub", "jinja2", "rich", "asyncio"}


def modules_after(code: str) -> set[str]:
    """The top-level modules of a fresh interpreter after running ``code``."""
    script = f"import sys\n{code}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_fleetfoot_imports_nothing_heavy() -> None:
    assert not modules_after("import fleetfoot; fleetfoot.__version__; dir(fleetfoot)") & HEAVY


@pytest.mark.parametrize(
    "names", ["SamplingParams, RequestOutputKind, RequestOutput, CompletionOutput, TokensPrompt, EngineConfig"]
)
def test_the_plain_names_need_no_torch(names: str) -> None:
    loaded = modules_after(f"from fleetfoot import {names}\nSamplingParams(temperature=0.5)\nEngineConfig()")
    assert not loaded & {"torch", "numpy", "tokenizers"}


def test_config_records_and_scheduler_need_no_torch() -> None:
    code = """
import importlib, pkgutil
for name in ("fleetfoot.config", "fleetfoot.records", "fleetfoot.scheduler"):
    package = importlib.import_module(name)
    found = [module.name for module in pkgutil.iter_modules(package.__path__, name + ".")]
    assert len(found) > 3, found
    for module in found:
        importlib.import_module(module)
"""
    assert not modules_after(code) & {"torch", "numpy", "tokenizers", "transformers", "safetensors"}


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
