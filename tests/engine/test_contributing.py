"""The examples of CONTRIBUTING.md, and of the pages of two rooms, do what the pages describe."""

import re
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine import test_models as parity
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import make_engine, prompt_of, run_requests
from tests.helpers.int8_method import quantize
from tests.helpers.interpreter import interpreted
from tests.helpers.paged_models import MODELS, PagedCache, assert_close, context, prompt, run
from tests.helpers.prefill_decode import tokens_of

from fleetfoot import SamplingParams
from fleetfoot.config import architectures, speculative
from fleetfoot.config.parsing import load_model_config
from fleetfoot.kernels import registry
from fleetfoot.kernels.registry import DeviceFacts
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.weights.loading import ModelLoader

_ROOT = Path(__file__).parents[2]
_ROOMS = (_ROOT / "src" / "fleetfoot" / name / "README.md" for name in ("kv_transfer", "quantization"))
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in (_ROOT / "CONTRIBUTING.md", *_ROOMS))
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
VOCAB = 2048  # of the `text_model`
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
REQUESTS = {str(length): (prompt_of(length, VOCAB, seed=length), GREEDY) for length in (30, 11, 5)}


@dataclass
class Page:
    """Puts examples in the places that the page names, for one test."""

    _folder: Path
    _monkeypatch: pytest.MonkeyPatch

    def add_module(self, name: str, example: str) -> ModuleType:
        """A file, because Triton reads the source of kernels."""
        path = self._folder / f"{example}_example.py"
        path.write_text(EXAMPLES[example], encoding="utf-8")
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        self._monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def add_entry(self, module: Any, table: str, example: str) -> None:
        """Run an example that adds to a table of the module, as if it stood there."""
        known = getattr(module, table)
        scope = {**vars(module), table: dict(known)}
        exec(EXAMPLES[example], scope)
        if isinstance(known, MappingProxyType):
            self._monkeypatch.setattr(module, table, MappingProxyType(scope[table]))
        else:
            for key in scope[table].keys() - known.keys():
                self._monkeypatch.setitem(known, key, scope[table][key])


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    return Page(tmp_path, monkeypatch)


def tokens(folder: Path, requests: dict[str, Any] = REQUESTS, **settings: Any) -> dict[str, list[int]]:
    engine = make_engine(folder, **settings)
    outputs = tokens_of(run_requests(engine, requests))
    engine.shutdown()
    return outputs


@pytest.fixture
def arcee(page: Page, tmp_path: Path) -> Any:
    """The reference model; its checkpoint is in ``tmp_path``."""
    page.add_module("fleetfoot.models.arcee", "model")
    page.add_entry(architectures, "ARCHITECTURES", "architecture")
    page.add_entry(parity, "MODELS", "parity")
    model_type, fields = MODELS["arcee"]
    return make_checkpoint(tmp_path, model_type, **fields)


@pytest.mark.usefixtures("arcee")
def test_a_model_has_the_logits_and_weights_of_transformers(tmp_path: Path) -> None:
    parity.test_logits_equal_those_of_transformers("arcee", tmp_path / "logits")
    (tmp_path / "names").mkdir()
    parity.test_the_weight_specs_are_the_tensors_of_checkpoints("arcee", tmp_path / "names")


def test_a_model_runs_on_both_runners(runner: str, arcee: Any, tmp_path: Path) -> None:
    requests = {"a": (prompt(30), GREEDY), "b": (prompt(9), GREEDY)}
    actual = tokens(tmp_path, requests, model_runner=runner, skip_tokenizer_init=True, block_size=4)
    for name, (prompt_ids, _) in requests.items():
        inputs = torch.tensor([prompt_ids])
        expected = arcee.generate(inputs, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
        assert actual[name] == expected[0, len(prompt_ids) :].tolist()


@pytest.mark.usefixtures("arcee")
def test_a_model_is_fused_on_v2_and_v1_is_its_default(tmp_path: Path) -> None:
    for settings, runner in (({}, "v1"), ({"use_v2_model_runner": True}, "v2")):
        engine = make_engine(tmp_path, skip_tokenizer_init=True, **settings)
        assert engine.runner_name == runner
        assert {layer.is_fused for layer in engine.plan.fusion} == {runner == "v2"}
        engine.shutdown()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_equals_its_reference(dtype: torch.dtype, page: Page) -> None:
    scope = dict(vars(page.add_module("fleetfoot.kernels.linear.squared_relu", "reference")))
    scope |= vars(page.add_module("fleetfoot.kernels.linear.squared_relu_triton", "kernel"))
    exec(EXAMPLES["equivalence"], scope)
    scope["test_squared_relu"](dtype)


def test_a_kernel_is_planned_and_loaded_by_its_line(page: Page) -> None:
    reference = page.add_module("fleetfoot.kernels.linear.squared_relu", "reference")
    page.add_entry(registry, "OPERATIONS", "registry")
    assert registry.plan_kernels(DeviceFacts("cuda", has_triton=True))["squared_relu"] == "triton"
    assert registry.plan_kernels(DeviceFacts("cpu"))["squared_relu"] == "torch"
    assert registry._load("squared_relu", "torch", None) is reference.squared_relu_torch


def test_a_drafter_proposes_tokens_and_changes_none(runner: str, text_model: Path, page: Page) -> None:
    page.add_module("fleetfoot.speculative.bigram", "drafter")
    page.add_entry(speculative, "DRAFT_METHODS", "method")
    config = {"method": "bigram", "num_speculative_tokens": 3, "adaptive": False}
    expected = tokens(text_model, model_runner="v1")
    engine = make_engine(text_model, model_runner=runner, speculative_config=config)
    for _ in range(2):  # the second time it has seen all of it
        assert tokens_of(run_requests(engine, REQUESTS)) == expected
    assert engine.stats().drafts.num_accepted > 20
    engine.shutdown()


def test_a_linear_method_computes_with_its_weights(page: Page, tmp_path: Path) -> None:
    module = page.add_module("fleetfoot.quantization.int8", "quantization")
    make_checkpoint(tmp_path, "qwen3")
    config, logits = load_model_config(tmp_path), []
    methods = (context(linear_methods=LinearMethods(module.Int8())), context())
    for method, tensors in zip(methods, quantize(load_file(tmp_path / "model.safetensors")), strict=True):
        save_file(tensors, tmp_path / "model.safetensors")
        model = ModelLoader(config, method, tmp_path).load()
        logits.append(run(model, PagedCache(config, 4), {0: prompt(30)})[0])
    assert_close(*logits)


def test_every_example_is_run() -> None:
    assert len(EXAMPLES) == PAGE.count("```python") == PAGE.count("<!-- example:")
    files = (Path(__file__), Path(__file__).with_name("test_connectors.py"))
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert not [name for name in EXAMPLES if f'"{name}"' not in source]


def test_the_pages_name_files_that_exist() -> None:
    root = Path(__file__).parents[2]
    source = root / "src" / "fleetfoot"
    added = {"my_models.py", "arcee.py", "squared_relu.py", "squared_relu_triton.py", "bigram.py"}  # by the examples
    pages = *root.glob("*.md"), *(root / "docs").glob("*.md"), *source.rglob("README.md")
    for page in pages:
        for name in re.findall(r"`([\w./]*\w+\.py)`", page.read_text(encoding="utf-8")):
            exists = (root / name).exists() or any(source.rglob(name))
            assert exists or Path(name).name in added, (page.name, name)
