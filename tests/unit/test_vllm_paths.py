"""vLLM's import paths, its argument parser and its engine arguments."""

import argparse
import dataclasses
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fleetfoot
from fleetfoot import AsyncEngineArgs, EngineArgs
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.config.vllm_names import ENGINE_KEYWORDS
from fleetfoot.utils import vllm_paths
from fleetfoot.utils.argparse_utils import FlexibleArgumentParser

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm_names.md"


def full_name(path: str) -> str:
    return f"fleetfoot.{path}".rstrip(".")


def test_every_path_has_its_names() -> None:
    documented = DOCUMENT.read_text()
    for path, names in vllm_paths.NAMES.items():
        module = import_module(full_name(path))
        for name in (place.rpartition(".")[2] for place in names.split()):
            assert getattr(module, name) is not None
            assert name in vars(module)  # found without a call the next time
            assert f"`{name}`" in documented
        assert f"`{full_name(path)}`" in documented
    assert import_module("fleetfoot.v1.engine.async_llm").AsyncLLM is fleetfoot.AsyncLLMEngine is fleetfoot.AsyncLLM


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from fleetfoot import PoolingParams", "fleetfoot has no PoolingParams; models generate text"),
        ("from fleetfoot.lora.request import LoRARequest", "there is no fleetfoot.lora; .*merge the adapter"),
        ("from fleetfoot.assets.image import ImageAsset", "there is no fleetfoot.assets.image; models take text alone"),
        ("from fleetfoot.sampling_params import StructuredOutputsParams", "constrained by grammars"),
        ("from fleetfoot.outputs import EmbeddingRequestOutput", "fleetfoot.outputs has no Embedding.*generate text"),
        ("from fleetfoot.v1.sample.logits_processor import BatchUpdate", "no fleetfoot.v1.sample; .*logit_bias"),
        ("import fleetfoot.v1.worker.gpu_worker", r"no fleetfoot.v1.worker; .*docs/vllm_names.md"),
        ("import fleetfoot.entrypoints.openai.api_server", "no fleetfoot.entrypoints.openai; there is no HTTP server"),
    ],
)
def test_what_there_is_not_has_advice(statement: str, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        exec(statement)


def test_other_names_are_missing_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fleetfoot", "fleetfoot.utils", "fleetfoot.v1.engine.async_llm"):
        assert not hasattr(import_module(module), "Nothing")
        with pytest.raises(ImportError, match=f"cannot import name 'Nothing' from '{module}'"):
            exec(f"from {module} import Nothing")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'fleetfoot.nothing'$"):
        import_module("fleetfoot.nothing")
    monkeypatch.setitem(vllm_paths.NAMES, "v1.engine.broken", "nowhere.Broken")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'fleetfoot.nowhere'$"):  # an error is not hidden
        exec("from fleetfoot.v1.engine.broken import Broken")


def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(prog="script")
    made.add_argument("--max-len", type=int)
    made.add_argument("--top_k", type=int)
    made.add_argument("--config-of-kv", type=json.loads)
    made.add_argument("--eager", action=argparse.BooleanOptionalAction)
    made.add_argument("--names", nargs="*")
    return made


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max_len", "3", "--top_k=2"], {"max_len": 3, "top_k": 2}),
        (["--config-of-kv.a", "3", "--config_of_kv.b_c.d=x.y"], {"config_of_kv": {"a": 3, "b_c": {"d": "x.y"}}}),
        (["--config-of-kv.a", "-1.5", "--names", "a_b", "0.5"], {"config_of_kv": {"a": -1.5}, "names": ["a_b", "0.5"]}),
    ],
)
def test_forms_of_arguments(words: list[str], expected: dict[str, Any]) -> None:
    parsed = vars(parser().parse_args(words))
    assert {name: value for name, value in parsed.items() if value is not None} == expected


def test_engine_arguments_are_settings() -> None:
    transfer = KVTransferConfig(kv_connector="SharedStorageConnector", kv_role="kv_both")
    arguments = EngineArgs("folder", kv_transfer_config=transfer, max_num_seqs=4)
    arguments.seed = 7
    expected = EngineConfig(model="folder", kv_transfer_config=transfer, max_num_seqs=4, seed=7)
    assert arguments.create_engine_config() == expected
    assert EngineConfig.from_keywords(dataclasses.asdict(arguments), owner="LLM") == expected
    with pytest.raises(TypeError, match="EngineArgs got an unknown keyword 'max_seqs'; did you mean 'max_num_seqs'"):
        EngineArgs(max_seqs=3)
    with pytest.raises(TypeError, match="AsyncEngineArgs does not support max_loras=3; LoRA"):
        AsyncEngineArgs(max_loras=3).create_engine_config()


@pytest.mark.parametrize("in_group", [False, True])
def test_engine_arguments_are_flags(in_group: bool, capsys: pytest.CaptureFixture[str]) -> None:
    made = FlexibleArgumentParser()
    target: Any = made.add_argument_group("Engine arguments") if in_group else made
    assert EngineArgs.add_cli_args(target) is target
    target.set_defaults(max_num_seqs=5)
    words = [
        "--model",
        "m",
        "-tp",
        "2",
        "-dp",
        "3",
        "--seed",
        "9",
        "--no-enforce-eager",
        "--speculative-config.method",
        "ngram",
    ]
    parsed = made.parse_args([*words, "--hf_token", "text"])
    names = {field.name for field in dataclasses.fields(EngineConfig)} | ENGINE_KEYWORDS.keys()
    assert vars(parsed).keys() == names
    arguments = EngineArgs.from_cli_args(parsed)
    assert vars(arguments) == vars(parsed)
    assert (arguments.tensor_parallel_size, arguments.data_parallel_size, arguments.seed) == (2, 3, 9)
    assert (arguments.max_num_seqs, arguments.enforce_eager, arguments.hf_token) == (5, False, "text")
    defaults = made.parse_args([])
    assert EngineConfig.from_keywords(vars(defaults), owner="LLM") == EngineConfig(max_num_seqs=5)
    with pytest.raises(SystemExit, match="0"):
        made.parse_args(["--help"])
    shown = capsys.readouterr().out
    assert "--max-num-seqs N" in shown and "SUPPRESS" not in shown and not re.search(r"default: .*default: ", shown)
