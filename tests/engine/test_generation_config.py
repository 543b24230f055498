"""Sampling defaults of a model on their way to requests: `LLM`, `AsyncLLM` and the commands."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.streams import async_test

from fleetfoot import LLM, AsyncLLM, LLMEngine, SamplingParams

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 2}
SAYS = {"temperature": 0.5, "top_k": 3, "max_new_tokens": 7, "do_sample": True}


Seen = list[SamplingParams]


@pytest.fixture
def model(text_model: Path, tmp_path: Path) -> Path:
    """A model that recommends SAYS."""
    folder = tmp_path / "model"
    shutil.copytree(text_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **SAYS}))
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The parameters that reach the engine."""
    params: Seen = []
    process_inputs = LLMEngine.process_inputs

    def spy(self: LLMEngine, request_id: str, prompt: Any, wanted: SamplingParams, **more: Any) -> Any:
        params.append(wanted)
        return process_inputs(self, request_id, prompt, wanted, **more)

    monkeypatch.setattr(LLMEngine, "process_inputs", spy)
    return params


def chosen(seen: Seen) -> list[tuple[float, int, int | None]]:
    return [(params.temperature, params.top_k, params.max_tokens) for params in seen]


def test_generate_and_chat_use_them_when_they_are_given_none(model: Path, seen: Seen) -> None:
    with LLM(model, **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=3, max_tokens=7)
        llm.generate("Once", use_tqdm=False)
        llm.chat([{"role": "user", "content": "Once"}], use_tqdm=False, chat_template=TEMPLATE)
        mine = SamplingParams(top_p=0.9)
        before = repr(mine)
        llm.generate("Once", mine, use_tqdm=False)
        assert repr(mine) == before
        assert chosen(seen) == [(0.5, 3, 7), (0.5, 3, 7), (1.0, 0, 16)]
        changed = llm.get_default_sampling_params()
        changed.top_k = 99
        assert llm.get_default_sampling_params().top_k == 3  # a new object each time


@async_test
async def test_the_async_engine_has_them_too(model: Path) -> None:
    async with AsyncLLM(model, **SETTINGS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=3, max_tokens=7)


def test_a_wrong_value_stops_the_start(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"top_p": 2}))
    with pytest.raises(ValueError, match=r"model/generation_config.json: top_p is 2: top_p must be .*'none' all"):
        LLM(model, **SETTINGS)
    with LLM(model, **SETTINGS, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
