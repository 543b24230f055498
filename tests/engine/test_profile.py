"""Traces of workers, on every face."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import prompt_of
from tests.helpers.streams import async_test, collect

from fleetfoot import LLM, AsyncLLM, SamplingParams
from fleetfoot.config import ProfilerConfig

SETTINGS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 4}
PROMPT = {"prompt_token_ids": prompt_of(20, 2048)}
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def events(path: str) -> set[str]:
    content = Path(path).read_bytes()
    text = gzip.decompress(content) if path.endswith(".gz") else content
    return {event.get("name", "") for event in json.loads(text)["traceEvents"]}


def test_a_trace_of_steps(text_model: Path, tmp_path: Path) -> None:
    config = {"profiler": "torch", "torch_profiler_dir": tmp_path / "new" / "folder"}
    with LLM(text_model, **SETTINGS, model_runner="v1", profiler_config=config) as llm:
        for prefix in (None, "second"):
            with pytest.raises(RuntimeError, match="stop_profile was called without a start_profile"):
                llm.stop_profile()
            for path in ("../outside", "/tmp/outside", "a/b", "a\n", "a" * 129, 7):
                with pytest.raises(ValueError, match=r"profile_prefix is .*; it must be the beginning of a file"):
                    llm.start_profile(path)  # type: ignore[arg-type]
            llm.start_profile(prefix)
            with pytest.raises(RuntimeError, match="start_profile was called before"):
                llm.start_profile()
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
            (path,) = llm.stop_profile()
            assert Path(path).parent == tmp_path / "new" / "folder"
            assert Path(path).name.startswith("second_rank0." if prefix else "rank0.")
            names = events(path)
            assert any(name.startswith("aten::") for name in names)
            assert any("sample_tokens" in name for name in names)  # a Python function


@async_test
async def test_an_asynchronous_engine_without_stacks(text_model: Path, tmp_path: Path) -> None:
    config = ProfilerConfig("torch", str(tmp_path), torch_profiler_with_stack=False, torch_profiler_use_gzip=False)
    llm = AsyncLLM(text_model, **SETTINGS, model_runner="v1", profiler_config=config)
    await llm.start_profile()
    await collect(llm.generate(PROMPT, GREEDY, "r"))
    (path,) = await llm.stop_profile()
    assert path.endswith(".json")
    names = events(path)
    assert any(name.startswith("aten::") for name in names) and not any("sample_tokens" in name for name in names)
    llm.shutdown()


def test_a_trace_of_the_engines_steps(text_model: Path, tmp_path: Path) -> None:
    config = {"profiler": "steps", "torch_profiler_dir": tmp_path}
    with LLM(text_model, **SETTINGS, profiler_config=config) as llm:
        with pytest.raises(RuntimeError):
            llm.stop_profile()
        for prefix in (None, "second"):
            with pytest.raises(ValueError):
                llm.start_profile("../outside")
            llm.start_profile(prefix)
            with pytest.raises(RuntimeError):
                llm.start_profile()
            llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False)
            (path,) = llm.stop_profile()
            assert Path(path).name.startswith("second_steps." if prefix else "steps.")
            names = events(path)
            assert {"step", "prompt", "decode", "requests"} <= names
            assert sum(name.startswith("request ") for name in names) == 3


def test_what_is_refused(text_model: Path) -> None:
    with LLM(text_model, **SETTINGS) as llm, pytest.raises(ValueError, match="no profiler is set; start the engine"):
        llm.start_profile()
    cases: dict[str, dict[str, Any]] = {
        "profiler is 'cuda'": {"profiler": "cuda", "torch_profiler_dir": "x"},
        "profiler is 'torch' and torch_profiler_dir ''": {"profiler": "torch"},
        "max_iterations": {"profiler": "torch", "torch_profiler_dir": "x", "max_iterations": 3},
    }
    for message, config in cases.items():
        with pytest.raises((ValueError, TypeError), match=f"profiler_config.*{message}"):
            LLM(text_model, profiler_config=config)
