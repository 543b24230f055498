"""Scripts as they are written for vLLM, on the embedded model, with nothing changed but the import."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.engines import run_requests

from fleetfoot import (
    LLM,
    CompletionOutput,
    EngineConfig,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)

PROMPTS = ["Hello, my name is", "The president of the United States is", "Once upon a time", "The future of AI is"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def test_the_offline_example(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    shown = capsys.readouterr()
    assert shown.out.count("Prompt: ") == 4  # the progress bar is on standard error
    assert "Generating" in shown.err
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert isinstance(output, RequestOutput)
        assert output.finished
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
        (completion,) = output.outputs
        assert isinstance(completion, CompletionOutput)
        assert completion.index == 0
        assert completion.finished()
        assert completion.finish_reason in ("stop", "length")
        assert 1 <= len(completion.token_ids) <= 16


def test_the_basic_example_without_parameters(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    defaults.seed = 7
    defaults.max_tokens = 5
    (output,) = llm.generate("Once upon a time", defaults, use_tqdm=False)
    (again,) = llm.generate(["Once upon a time"], [defaults], use_tqdm=False)
    assert output.outputs == again.outputs
    assert len(llm.generate(PROMPTS, use_tqdm=False)) == 4


def test_every_form_of_prompt(llm: LLM) -> None:
    text = PROMPTS[0]
    token_ids = llm.get_tokenizer().encode(text)
    params = SamplingParams(temperature=0, max_tokens=6)
    forms: list[Any] = [
        text,
        [text],
        {"prompt": text},
        [TextPrompt(prompt=text)],
        {"prompt_token_ids": token_ids},
        [TokensPrompt(prompt_token_ids=token_ids)],
        token_ids,
        [token_ids],
        (tuple(token_ids),),
        {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": "x"},
    ]
    outputs = [llm.generate(form, params, use_tqdm=False) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert {tuple(output[0].outputs[0].token_ids) for output in outputs} == {tuple(outputs[0][0].outputs[0].token_ids)}
    for form, (output,) in zip(forms, outputs, strict=True):
        assert output.prompt_token_ids == token_ids
        shows_text = "prompt'" in str(form) or text in str(form)
        assert output.prompt == (text if shows_text else None)
    mixed = llm.generate([text, {"prompt_token_ids": token_ids}, token_ids], params, use_tqdm=False)
    assert len(mixed) == 3


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        SamplingParams(n=3, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.5, max_tokens=6, stop="\n", ignore_eos=True),
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [1, 3, 1, 1]
    assert [len(output.outputs[0].token_ids) for output in outputs[:3]] == [3, 4, 5]
    assert [completion.index for completion in outputs[1].outputs] == [0, 1, 2]
    (completion,) = outputs[2].outputs
    assert completion.logprobs is not None
    for position, entry in enumerate(completion.logprobs):
        chosen = completion.token_ids[position]
        assert entry[chosen].rank == 1  # it was greedy
        assert len(entry) == 2
        assert all(logprob.logprob <= 0 for logprob in entry.values())
    assert completion.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    )
    assert outputs[2].prompt_logprobs is not None
    assert outputs[2].prompt_logprobs[0] is None
    assert len(outputs[2].prompt_logprobs) == len(outputs[2].prompt_token_ids)
    perplexity = math.exp(
        -sum(
            entry[token].logprob
            for entry, token in zip(outputs[2].prompt_logprobs, outputs[2].prompt_token_ids, strict=True)
            if entry is not None
        )
        / (len(outputs[2].prompt_token_ids) - 1)
    )
    assert 1 < perplexity < math.inf


def test_chat(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Tell me a story."},
    ]
    params = SamplingParams(temperature=0, max_tokens=12)
    (single,) = llm.chat(conversation, params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert single.prompt == tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    # one begin-of-text token: the template writes it, and the tokenizer must not write it once more
    assert single.prompt_token_ids.count(tokenizer.bos_token_id) == 1
    batch = llm.chat([conversation, conversation[:2]], sampling_params=params, use_tqdm=False)
    assert len(batch) == 2
    assert batch[0].outputs[0].token_ids == single.outputs[0].token_ids
    assert batch[1].prompt_token_ids != batch[0].prompt_token_ids
    (going_on,) = llm.chat(
        conversation[:3],
        params,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert str(going_on.prompt).endswith("today?")
    (own,) = llm.chat(
        conversation,
        params,
        use_tqdm=False,
        chat_template="{% for m in messages %}{{ m['content'] }}{{ sign }}{% endfor %}",
        chat_template_kwargs={"sign": "!"},
    )
    assert str(own.prompt).startswith("You are a helpful assistant!Hello!")


def test_a_maker_of_progress_bars(llm: LLM) -> None:
    calls: list[Any] = []

    class Bar:
        def __init__(self, **keywords: Any) -> None:
            calls.append(keywords)

        def update(self, count: int) -> None:
            calls.append(count)

        def close(self) -> None:
            calls.append("closed")

    llm.generate(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=Bar)
    assert calls == [{"total": 4, "desc": "Generating"}, 1, 1, 1, 1, "closed"]


def test_no_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=9 - 2 * number, ignore_eos=True) for number in range(4)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 7, 5, 3]
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 4))


def test_callers_parameters_stay_as_they_are(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA, stop=["x"])
    before = repr(params)
    (output,) = llm.generate("Once", params, use_tqdm=False)
    assert repr(params) == before
    assert output.finished and output.outputs[0].token_ids


def test_metrics_and_stats(llm: LLM) -> None:
    before = llm.stats()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    after = llm.stats()
    assert after.num_generation_tokens - before.num_generation_tokens == 24
    assert after.num_prompt_tokens - before.num_prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs)
    assert after.num_finished["length"] - before.num_finished.get("length", 0) == 4
    assert (after.scheduler.num_running, after.scheduler.num_waiting, after.scheduler.kv_cache_usage) == (0, 0, 0.0)
    for output in outputs:
        metrics = output.metrics
        assert metrics.num_generation_tokens == 6
        assert metrics.queued_ts < metrics.first_token_ts < metrics.last_token_ts
        assert metrics.first_token_latency > 0
        assert metrics.time_per_output_token > 0


def test_the_step_by_step_engine() -> None:
    """What vLLM's `LLMEngine` example does."""
    engine = LLMEngine.from_config(EngineConfig(max_num_seqs=4))
    engine.add_request("0", "A robot may not injure a human being", SamplingParams(temperature=0.0, max_tokens=8))
    engine.add_request("1", "To be or not to be,", SamplingParams(temperature=0.8, top_k=5, n=2, max_tokens=8))
    finished: dict[str, RequestOutput] = {}
    num_outputs = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_outputs += 1
            if output.finished:
                finished[output.request_id] = output
    assert finished.keys() == {"0", "1"}
    assert num_outputs > 2
    assert [len(finished[name].outputs) for name in "01"] == [1, 2]
    assert engine.step() == []
    engine.shutdown()


def test_a_request_that_was_added_by_hand_does_not_disturb_generate(llm: LLM) -> None:
    llm.llm_engine.add_request("stranger", "Once upon", SamplingParams(max_tokens=1))
    (output,) = llm.generate("The fox", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert not llm.llm_engine.has_unfinished_requests()


def test_two_engines_in_one_process(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    with LLM("story-llama", max_num_seqs=2, max_model_len=64, block_size=4, enforce_eager=True, seed=3) as other:
        outputs = other.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)  # the other's end is not ours
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_prompts_of_any_text(llm: LLM) -> None:
    texts = ["😀", "你好", "\x00", " ", "\n\n", "<|begin|><|end|>", "a" * 500, "é" * 50, "�"]
    outputs = run_requests(
        llm.llm_engine, {str(i): (text, SamplingParams(max_tokens=3)) for i, text in enumerate(texts)}
    )
    for number, text in enumerate(texts):
        assert outputs[str(number)].prompt == text
        assert outputs[str(number)].outputs[0].token_ids


def test_paths_and_torch_dtypes_are_taken_as_they_come(text_model: Path) -> None:
    with LLM(text_model, tokenizer=text_model, dtype=torch.float32, max_num_seqs=2) as llm:
        assert llm.config.dtype == "float32"
        assert llm.config.model == llm.config.tokenizer == str(text_model)
        output = llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)[0]
    metrics = output.metrics
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts


def test_the_tokenizer_answers_to_the_names_that_scripts_know(text_model: Path) -> None:
    with LLM(text_model, max_num_seqs=2) as llm:
        tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tokenize=True) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer("Hello")["input_ids"] == tokenizer.encode("Hello")
    assert len(tokenizer) == tokenizer.vocab_size


def watched(llm: LLM) -> list[str]:
    """Names of the engine's methods that `generate` calls from now on."""
    calls: list[str] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            return call(*arguments, **keywords)

        return note

    for name in ("add_request", "step"):
        setattr(llm.llm_engine, name, noting(name, getattr(llm.llm_engine, name)))
    return calls


@pytest.mark.parametrize("use_v2", [False, True])
def test_a_step_that_is_full_begins_before_the_last_prompts_are_added(use_v2: bool) -> None:
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "dtype": "float32",
    }
    prompts = [[5 + number] * 12 for number in range(7)]
    params = [SamplingParams(max_tokens=1 + 3 * number, ignore_eos=True, temperature=0.0) for number in range(7)]
    results = []
    for policy in ("fcfs", "priority"):  # by which a step depends on what is queued behind it
        with LLM(use_v2_model_runner=use_v2, scheduling_policy=policy, **settings) as llm:
            calls = watched(llm)
            results.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            llm.llm_engine.check_integrity()
        begun = calls[: calls.index("step")].count("add_request")
        assert begun == (3 if policy == "fcfs" else 7)
        assert calls[:8].count("step") == 1
    assert results[0] == results[1]
    assert [len(token_ids) for token_ids in results[0]] == [1 + 3 * number for number in range(7)]


def test_a_prompt_that_is_refused_behind_a_step_ends_the_call() -> None:
    with LLM(max_num_batched_tokens=32, max_num_seqs=8, max_model_len=64) as llm:
        calls = watched(llm)
        with pytest.raises(ValueError, match="max_model_len"):
            llm.generate([[5] * 12] * 6 + [[5] * 90], SamplingParams(max_tokens=9), use_tqdm=False)
        assert "step" in calls
        assert not llm.llm_engine.has_unfinished_requests()
        llm.llm_engine.check_integrity()
        assert len(llm.generate([[5] * 12] * 6, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)) == 6
