"""vLLM's import paths, its argument parser and its engine arguments."""

import dataclasses
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fleetfoot.platforms import current_platform

import fleetfoot
from fleetfoot import AsyncEngineArgs, EngineArgs
from fleetfoot.compat import paths as vllm_paths
from fleetfoot.compat.arguments import FlexibleArgumentParser, parse_value
from fleetfoot.compat.names import ENGINE_KEYWORDS
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.distributed import cleanup_dist_env_and_memory
from fleetfoot.utils import get_open_port

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm_names.md"


def test_every_path_has_its_names() -> None:
    documented = DOCUMENT.read_text()
    for path, names in vllm_paths.NAMES.items():
        module = import_module(f"fleetfoot.{path}".rstrip("."))
        for name in (place.rpartition(".")[2] for place in names.split()):
            assert getattr(module, name) is not None
            assert name in vars(module)  # found without a call the next time
            assert f"`{name}`" in documented
        assert f"`{module.__name__}`" in documented
    assert not current_platform.is_rocm() and current_platform.is_cpu() is not current_platform.is_cuda()
    assert 0 < get_open_port() < 65536
    cleanup_dist_env_and_memory()
    assert import_module("fleetfoot.v1.engine.async_llm").AsyncLLM is fleetfoot.AsyncLLMEngine is fleetfoot.AsyncLLM


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import fleetfoot.profiler", "no fleetfoot.profiler; .*start_profile"),
        ("from fleetfoot.lora.request import LoRARequest", "there is no fleetfoot.lora; .*merge the adapter"),
        ("from fleetfoot.assets.image import ImageAsset", "there is no fleetfoot.assets.image; models take text alone"),
        ("from fleetfoot.logits_process import Any", r"; SamplingParams\(logits_processors="),
        ("from fleetfoot.v1.sample.logits_processor import LogitsProcessors", r"; .*LLM\(logits_processors="),
        ("from fleetfoot.v1.sample.sampler import Sampler", r"no fleetfoot.v1.sample.sampler; .*docs/vllm_names.md"),
        ("import fleetfoot.v1.worker.gpu_worker", r"no fleetfoot.v1.worker; .*docs/vllm_names.md"),
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


def test_forms_of_arguments() -> None:
    parser = FlexibleArgumentParser(prog="script")
    for name in ("--max-len", "--top_k", "--config-of-kv", "--names"):
        parser.add_argument(name, type=parse_value, nargs="*" if name == "--names" else None)
    words = "--max_len 3 --top-k=2 --config-of-kv.a -1.5 --config_of_kv.b_c.d=x.y --names a_b 0.5"
    parsed = {"max_len": 3, "top_k": 2, "names": ["a_b", 0.5], "config_of_kv": {"a": -1.5, "b_c": {"d": "x.y"}}}
    assert vars(parser.parse_args(words.split())) == parsed


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
    words = "--model m -tp 2 -dp 3 --seed 9 --no-enforce-eager --speculative-config.method ngram --hf_token text"
    parsed = made.parse_args(words.split())
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


def test_print_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    print_utils = import_module("fleetfoot.utils.print_utils")
    print_utils.print_embeddings([0.5, 1.0, 2.0, 3.0, 4.0], indent=1)
    assert capsys.readouterr().out == " Embedding: [0.5, 1.0, 2.0, 3.0, ...] (size=5)\n"
