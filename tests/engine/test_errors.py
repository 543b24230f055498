"""Errors: before anything runs if possible, else on the request concerned, else on all pending calls."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.engines import TEXT_MODEL, ScriptedExecutor, change_weights, drain, prompt_of, scripted_engine

from fleetfoot import LLM, EngineDeadError, SamplingParams
from fleetfoot.engine.input_processor import TOO_LONG
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.utils.validation import FieldError

VOCAB = TEXT_MODEL["vocab_size"]
MAX_LEN = TEXT_MODEL["max_position_embeddings"]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(text_model: Path) -> Iterator[LLM]:
    with LLM(str(text_model), device="cpu", max_num_seqs=4) as llm:
        yield llm


@pytest.fixture
def nothing_is_left(llm: LLM) -> Iterator[None]:
    """After what a test did, the engine holds nothing of it, and still works."""
    yield
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.core.scheduler.running == []
    llm.llm_engine.core.scheduler.check_idle()
    llm.llm_engine.check_integrity()
    (output,) = llm.generate(prompt_of(5, VOCAB), GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


TWO = [[5, 6], [7, 8]]
IDS = "prompt_token_ids"
REFUSED: list[tuple[Any, Any, type[Exception], str, str | None]] = [
    ([[]], GREEDY, ValueError, "prompts[0].prompt", None),
    ({"prompt": "a", "images": []}, GREEDY, ValueError, "prompt", None),
    (None, GREEDY, TypeError, "prompts", None),
    (5, GREEDY, TypeError, "prompts", None),
    (b"abc", GREEDY, TypeError, "prompts", None),
    (["a", None], GREEDY, TypeError, "prompts[1].prompt", None),
    (["a", bytearray(8)], GREEDY, TypeError, "prompts[1].prompt", None),
    ([5, -1], GREEDY, ValueError, f"{IDS}[1]", None),
    ([[5], [6], [9999], [7]], GREEDY, ValueError, f"prompts[2].{IDS}[0]", None),
    ([5] * MAX_LEN, GREEDY, ValueError, "prompt", TOO_LONG),
    ("fox " * 1000, GREEDY, ValueError, "prompt", TOO_LONG),
    ("fox " * 500, GREEDY, ValueError, "prompt", TOO_LONG),
    ("a \ud800", GREEDY, ValueError, "text", None),
    (TWO, {"stop_token_ids": [VOCAB]}, ValueError, "stop_token_ids", None),
    (TWO, {"logprobs": 21}, ValueError, "logprobs", None),
    (TWO, {"min_tokens": 300, "max_tokens": 300}, ValueError, "prompts[0].min_tokens", None),
    (TWO, [GREEDY] * 3, ValueError, "sampling_params", None),
    (TWO, [], ValueError, "sampling_params", None),
    (TWO, 0, TypeError, "sampling_params", None),
    (TWO, [GREEDY, None], TypeError, "sampling_params[1]", None),
    ([*TWO, [], "a"], GREEDY, ValueError, "prompts[2].prompt", None),
    (["a", {"prompt": 5}], GREEDY, TypeError, "prompts[1].prompt", None),
    (np.array([[5, 6], [7, -1]]), GREEDY, ValueError, f"prompts[1].{IDS}[1]", None),
    ([np.int64(5), np.int64(-1)], GREEDY, ValueError, f"{IDS}[1]", None),
    (np.array(5), GREEDY, TypeError, "prompts", None),
    (memoryview(b"ab"), GREEDY, TypeError, "prompts", None),
    ({5, 6}, GREEDY, TypeError, "prompts", None),
]


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("prompts", "params", "error", "field", "code"), REFUSED, ids=range(len(REFUSED)))
def test_calls_that_are_refused(
    prompts: Any, params: Any, error: type[Exception], field: str, code: str | None, llm: LLM
) -> None:
    before = llm.stats().num_steps
    params = SamplingParams(**params) if isinstance(params, dict) else params
    with pytest.raises(error) as raised:
        llm.generate(prompts, params, use_tqdm=False)
    assert isinstance(raised.value, FieldError) and (raised.value.field, raised.value.code) == (field, code)
    assert llm.stats().num_steps == before


def test_conversations_that_are_refused(llm: LLM) -> None:
    user = {"role": "user", "content": "hello"}
    conversations: list[tuple[str, Any]] = [
        ("messages", []),
        ("messages", "hello"),
        ("messages", user),
        ("messages", None),
        ("messages[0]", ["hello"]),
        ("messages[1][0]", [[user], [{"role": "user"}]]),
        ("messages[1]", [[user], user]),
        ("messages[0]", [[[user]]]),
        ("messages[1].prompt", [[user], [{"role": "user", "content": "a" * 10**6}]]),
    ]
    for field, messages in conversations:
        with pytest.raises(FieldError) as raised:
            llm.chat(messages, GREEDY, use_tqdm=False)
        assert raised.value.field == field
    keywords: list[tuple[str, dict[str, Any]]] = [
        ("chat_template is 5; it must be", {"chat_template": 5}),
        ("add_generation_prompt='no' and .* must be True or False", {"add_generation_prompt": "no"}),
        ("tools must be a list of dicts", {"tools": "search"}),
        ("chat_template_kwargs is 5; it must be a dict", {"chat_template_kwargs": 5}),
        ("chat_template_kwargs is {5: 6}; it must be a dict", {"chat_template_kwargs": {5: 6}}),
        *(
            (f"chat_template_kwargs has '{name}', which is not", {"chat_template_kwargs": {name: True}})
            for name in ("tokenize", "messages", "chat_template", "return_dict", "self")
        ),
        ("tools is .*, and in chat_template_kwargs", {"tools": [{}], "chat_template_kwargs": {"tools": [{"a": 1}]}}),
        (
            "add_generation_prompt is False, and in chat_template_kwargs True; give it once",
            {"add_generation_prompt": False, "chat_template_kwargs": {"add_generation_prompt": True}},
        ),
    ]
    for message, given in keywords:
        with pytest.raises((TypeError, ValueError), match=message):
            llm.chat([user], GREEDY, use_tqdm=False, **given)


def test_priorities_and_no_prompts(llm: LLM) -> None:
    for priority in ([1, 2], []):
        with pytest.raises(ValueError, match="scheduling_policy='priority'"):
            llm.generate([[5, 6], [7, 8]], GREEDY, use_tqdm=False, priority=np.array(priority))
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_the_engine_names_what_it_refuses(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("r", [5, 6], GREEDY)
    with pytest.raises(ValueError, match="request_id is 'r', which"):
        engine.add_request("r", [5, 6], GREEDY)
    for wrong in ("", 5, None):
        with pytest.raises(ValueError, match=r"request_id is .*; it must be a string"):
            engine.add_request(wrong, [5, 6], GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="priority is 3, but scheduling_policy is 'fcfs'"):
        engine.add_request("s", [5, 6], GREEDY, priority=3)
    engine.abort_request("r")
    assert [output.request_id for output in drain(engine) if output.finished] == ["r"]


@pytest.mark.parametrize("copies", [1, 3])
def test_a_request_longer_than_the_whole_cache(copies: int, text_model: Path) -> None:
    limits = {"max_num_seqs": 4, "max_model_len": 200, "num_gpu_blocks_override": 10, "block_size": 8}
    message = r"KV for 89 tokens \(40 of prompt and 50 to generate, less one\)"
    message += r".* the whole cache holds 80 \(10 blocks of 8\).* set max_tokens to at most 41"
    with LLM(str(text_model), device="cpu", **limits) as llm:
        with pytest.raises(ValueError, match=message):
            params = SamplingParams(max_tokens=50, n=copies)
            llm.generate([prompt_of(5, VOCAB), prompt_of(40, VOCAB)], params, use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
        llm.llm_engine.core.scheduler.check_idle()
        longest = SamplingParams(max_tokens=41, ignore_eos=True)
        (output,) = llm.generate([prompt_of(40, VOCAB)], longest, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 41
        assert llm.stats().scheduler.num_preemptions == 0


def _with_weight(text_model: Path, folder: Path, name: str, index: int, value: float) -> Path:
    shutil.copytree(text_model, folder, dirs_exist_ok=True)
    change_weights(folder, lambda weights: weights[name][index].fill_(value))
    return folder


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_numbers(value: float, text_model: Path, tmp_path: Path) -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(logprobs=2, prompt_logprobs=2),
        SamplingParams(top_p=0.5, top_k=3, min_p=0.1, seed=0, min_tokens=3),
        SamplingParams(n=2, stop=["a"], allowed_token_ids=[5, 6]),
    ]
    folder = _with_weight(text_model, tmp_path, "model.norm.weight", 0, value)
    with LLM(folder, device="cpu", max_num_seqs=4) as llm:
        for output in llm.generate([prompt_of(20, VOCAB)] * 4, params, use_tqdm=False):
            assert output.finished
            for completion in output.outputs:
                assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [], "")
                assert "NaN or infinite" in str(completion.stop_reason)
        assert llm.stats().num_finished == {"error": 4}
        llm.llm_engine.core.scheduler.check_idle()


def test_what_was_generated_before_the_error_is_kept(text_model: Path, tmp_path: Path) -> None:
    """A token with a NaN embedding is sampled half-way: earlier output is returned, with text that was held back."""
    folder = _with_weight(text_model, tmp_path, "model.embed_tokens.weight", 300, torch.nan)
    with LLM(folder, device="cpu", max_num_seqs=4) as llm:
        free = SamplingParams(temperature=0, max_tokens=8, logit_bias={300: -1e9}, ignore_eos=True)
        text = llm.get_tokenizer().decode([300])
        forced = SamplingParams(max_tokens=8, allowed_token_ids=[300], stop=[text + "#"], logprobs=0)
        outputs = llm.generate([[5, 6], [5, 6]], [free, forced], use_tqdm=False)
        assert outputs[0].outputs[0].finish_reason == "length"
        completion = outputs[1].outputs[0]
        assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", [300], text)
        assert completion.logprobs is not None and len(completion.logprobs) == 1


class _BrokenError(RuntimeError): ...


def _failing(at_step: int, error: BaseException) -> ScriptedExecutor:
    def fail(step: SchedulerOutput) -> None:
        if step.step == at_step:
            raise error

    return ScriptedExecutor(before_step=fail)


def test_a_step_that_raises_ends_the_engine_with_the_first_cause() -> None:
    cause = _BrokenError("the device fell off the bus")
    engine = scripted_engine(_failing(2, cause))
    for name in "ab":
        engine.add_request(name, [5, 6], SamplingParams(max_tokens=10))
    engine.step()
    engine.step()
    for call in (engine.step, engine.step, lambda: engine.add_request("c", [5], GREEDY)):
        with pytest.raises(EngineDeadError, match="_BrokenError: the device fell off the bus") as caught:
            call()
        assert caught.value.__cause__ is cause
        assert cause.__traceback__ is not None
    engine.abort_request(["a", "b"])  # no error: nothing runs
    engine.stats()
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="fell off the bus"):  # still the first cause
        engine.step()


def test_what_can_never_go_on_is_an_error_and_ends_the_engine() -> None:
    engine = scripted_engine(ScriptedExecutor())
    engine.add_request("r", [5, 6], SamplingParams(max_tokens=2))
    engine.step()
    engine.core.scheduler.pool.take(1)  # as a bug would: a block without an owner
    with pytest.raises(RuntimeError, match="block"):
        engine.check_integrity()
    with pytest.raises(EngineDeadError, match="no request is left, but 1 KV blocks"):
        engine.step()
    engine = scripted_engine(ScriptedExecutor(), num_blocks=8)
    engine.core.scheduler.pool.take(8)  # blocks that will never come back
    engine.add_request("r", [5, 6], GREEDY)
    with pytest.raises(EngineDeadError, match=r"none can be scheduled.*num_waiting=1"):
        engine.step()
