"""The table of architectures in the documentation, and classes of users that run models."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint, make_reference, reference_logits
from tests.helpers.commands import CommandRunner

from fleetfoot import LLM, ModelRegistry, SamplingParams
from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.model_registry import PLUGINS
from fleetfoot.config.parsing import load_model_config, parse_model_config
from fleetfoot.fusion import plan_fusion
from fleetfoot.models.interface import model_class
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.outputs import RequestOutput

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
NAME = "CappedLlamaForCausalLM"
CAP = 5.0
PROMPT = [5, 6, 7]
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=1)


def test_the_table_has_every_architecture_with_its_fused_layers() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (V1|V2) \| ([^|]+) \|$", PAGE, re.MULTILINE)
    expected = []
    for name, entry in ARCHITECTURES.items():
        fields = {"num_local_experts": 0} if "Hybrid" in name else {"head_dim": 128}
        config = parse_model_config({"architectures": [name], **fields}, {}, "config.json")
        fusion = plan_fusion(config, "v2")
        reasons = ", ".join(dict.fromkeys(layer.reason for layer in fusion if not layer.is_fused))
        layers = f"none: {reasons}" if reasons else "all"
        if len({layer.is_fused for layer in fusion}) > 1:
            layers = f"those without {reasons}"
        expected.append((name, "V2" if entry.default_on_v2 else "V1", layers))
    assert sorted(rows) == sorted(expected)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of the page's class, which is in a module; no architecture stays registered."""
    known = dict(ARCHITECTURES)
    (tmp_path / "my_models.py").write_text(EXAMPLES["module"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    make_checkpoint(tmp_path / "model", "llama")
    change(tmp_path / "model", architectures=[NAME], logit_cap=CAP)
    yield tmp_path / "model"
    ARCHITECTURES.clear()
    ARCHITECTURES.update(known)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def assert_is_capped(output: RequestOutput, cap: float = CAP) -> None:
    """Against the plain model in the same place."""
    tokens = output.outputs[0].token_ids
    logits = reference_logits(make_reference("llama"), [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    assert tokens == logits.argmax(dim=-1).tolist()
    capped = (cap * (logits / cap).tanh()).log_softmax(dim=-1)
    assert output.outputs[0].logprobs is not None
    found = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, tokens, strict=True)]
    assert found == pytest.approx(capped.max(dim=-1).values.tolist(), abs=1e-4)


def generate(folder: Path, **settings: Any) -> tuple[RequestOutput, Any]:
    with LLM(str(folder), skip_tokenizer_init=True, device="cpu", dtype="float32", **settings) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
        return output, llm.llm_engine.plan


def test_the_pages_script_runs_in_worker_processes(folder: Path) -> None:
    scope: dict[str, Any] = {"folder": str(folder)}
    exec(EXAMPLES["script"], scope)
    (output,) = scope["outputs"]
    plan = scope["llm"].llm_engine.plan
    scope["llm"].shutdown()
    assert_is_capped(output)
    assert (plan.runner, plan.model.architecture) == ("v1", NAME)
    assert f"{NAME} is not one of the architectures that V2 is the default of" in plan.decision.reasons[0]


def capped_traits(fields: Any) -> dict[str, Any]:
    return {"extras": {"logit_cap": fields.number("logit_cap")}}


def test_workers_do_not_find_a_class_that_is_in_no_module(folder: Path) -> None:
    class Local(LlamaForCausalLM): ...

    ModelRegistry.register_model(NAME, Local)
    config = load_model_config(folder)
    assert model_class(config) is Local
    del ARCHITECTURES[NAME]  # as in a worker
    with pytest.raises(ValueError, match=r"Local of CappedLlama.* cannot be imported .* put it into a module"):
        model_class(config)


def test_a_class_takes_the_place_of_an_architecture(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(folder, architectures=["LlamaForCausalLM"], attention_bias=False)
    fused = {"traits": lambda fields: {**capped_traits(fields), "layer": {"unfusible": ""}}}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ModelRegistry.register_model("LlamaForCausalLM", f"my_models:{NAME}", **fused)
    assert caplog.text.count("takes the place of fleetfoot.models.llama:LlamaForCausalLM") == 1
    output, plan = generate(folder, model_runner="v2")
    assert_is_capped(output)
    assert all(layer.is_fused for layer in plan.fusion)
    assert NAME not in ModelRegistry.get_supported_archs()


def test_plugins_register_models(folder: Path, run: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> None:
        ModelRegistry.register_model(NAME, f"my_models:{NAME}", traits=capped_traits)

    def broken() -> None:
        raise ModuleNotFoundError("no my_plugin")

    def listed(group: str) -> list[Any]:
        return [plugin] if group == PLUGINS else []

    plugin = SimpleNamespace(name="mine", value="my_plugin:register", load=lambda: register)
    monkeypatch.setattr("fleetfoot.config.model_registry.entry_points", listed)
    words = " ".join(run("plan", str(folder), "--device", "cpu").split())
    assert f"{folder}: {NAME}, " in words
    words = " ".join(run("plan", str(folder), "--device", "cpu", "--model-runner", "v2").split())
    assert f"layers 0 to 2 plain: a registered class, my_models:{NAME}" in words
    monkeypatch.setattr(plugin, "load", broken)
    assert "the plugin 'mine' (my_plugin:register) cannot be imported: no my_plugin" in run.refused("plan", str(folder))


def test_wrong_arguments_and_classes(folder: Path) -> None:
    register: Any = ModelRegistry.register_model
    for arguments, message in (
        ((5, LlamaForCausalLM), "model_arch is 5"),
        ((NAME, "my_models"), "model_cls is 'my_models'; it must be a class, or its name as 'module:class'"),
        ((NAME, 5), "model_cls is 5"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            register(*arguments)
    with pytest.raises(TypeError, match="register_model has no default_on_v2; it takes traits, activation"):
        register(NAME, LlamaForCausalLM, default_on_v2=True)
    for model_cls, message in (
        (torch.nn.Linear, "is registered as a model; expected a class derived from fleetfoot.models.interface.Causa"),
        ("my_models:Missing", "the class my_models:Missing of CappedLlamaForCausalLM cannot be imported"),
    ):
        register(NAME, model_cls)
        with pytest.raises(ValueError, match=message):
            generate(folder)


def test_vllms_paths() -> None:
    for path in ("fleetfoot", "fleetfoot.model_executor.models", "fleetfoot.model_executor.models.registry"):
        assert import_module(path).ModelRegistry is ModelRegistry
