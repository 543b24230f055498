"""Scripts as they are written for vLLM, on the embedded model, with nothing changed but the import."""

import copy
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.helpers.engines import TEXT_MODEL, drain, make_engine, prompt_of, run_requests

from fleetfoot import LLM, EngineConfig, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.inputs import TextPrompt, TokensPrompt
from fleetfoot.outputs import CompletionOutput

PROMPTS = ["Hello, my name is", "The president of the United States is", "Once upon a time", "The future of AI is"]
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Tell me a story."},
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ sign }}{% endfor %}"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    path = str(embedded_model_path())
    with LLM(model=path, tokenizer=path, seed=1, gpu_memory_utilization=0.5, block_size=4, device="cpu") as llm:
        yield llm


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def test_the_offline_example(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    shown = capsys.readouterr()
    assert shown.out.count("Prompt: ") == 4
    assert not shown.err  # bars are for terminals
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert isinstance(output, RequestOutput) and output.finished
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
        (completion,) = output.outputs
        assert isinstance(completion, CompletionOutput) and completion.finished()
        assert (completion.index, completion.finish_reason in ("stop", "length")) == (0, True)
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
    both: Any = {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": "x"}
    with_text: list[Any] = [text, [text], {"prompt": text}, [TextPrompt(prompt=text)], both]
    ids_alone: list[Any] = [{"prompt_token_ids": token_ids}, [TokensPrompt(prompt_token_ids=token_ids)]]
    ids_alone += [token_ids, [token_ids], (tuple(token_ids),)]
    generated = set()
    for form in with_text + ids_alone:
        (output,) = llm.generate(form, greedy(6), use_tqdm=False)
        assert output.prompt_token_ids == token_ids
        assert output.prompt == (text if form in with_text else None)
        generated.add(tuple(output.outputs[0].token_ids))
    assert len(generated) == 1
    assert len(llm.generate([text, {"prompt_token_ids": token_ids}, token_ids], greedy(6), use_tqdm=False)) == 3


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [
        greedy(3),
        SamplingParams(n=3, max_tokens=4, ignore_eos=True),
        greedy(5, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0.5, max_tokens=6, stop="\n", ignore_eos=True),
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [1, 3, 1, 1]
    assert [len(output.outputs[0].token_ids) for output in outputs[:3]] == [3, 4, 5]
    assert [completion.index for completion in outputs[1].outputs] == [0, 1, 2]
    (completion,), prompt_logprobs = outputs[2].outputs, outputs[2].prompt_logprobs
    assert completion.logprobs is not None and prompt_logprobs is not None
    sampled = [entry[token] for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert all(logprob.rank == 1 for logprob in sampled)  # it was greedy
    assert all(len(entry) == 2 and max(item.logprob for item in entry.values()) <= 0 for entry in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in sampled))
    assert prompt_logprobs[0] is None
    pairs = zip(prompt_logprobs, outputs[2].prompt_token_ids, strict=True)
    known = [entry[token].logprob for entry, token in pairs if entry is not None]
    assert 1 < math.exp(-sum(known) / (len(prompt_logprobs) - 1)) < math.inf  # the perplexity


def test_outputs_come_in_the_order_of_the_prompts_and_parameters_stay_as_they_are(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA, stop=["x"])
    before = repr(params)
    (output,) = llm.generate("Once", params, use_tqdm=False)
    assert repr(params) == before
    assert output.finished and output.outputs[0].token_ids
    outputs = llm.generate(PROMPTS, [greedy(9 - 2 * number) for number in range(4)], use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 7, 5, 3]
    numbers = [int(output.request_id) for output in outputs]
    assert numbers == list(range(numbers[0], numbers[0] + 4))


def test_progress_bars(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bar = mock.Mock()
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=bar)
    made = mock.call(total=4, desc="Generating")
    assert bar.mock_calls == [made, *[mock.call().update(1)] * 4, mock.call().close()]
    llm.generate(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=None)
    assert capsys.readouterr() == ("", "")


def test_metrics_and_stats(llm: LLM) -> None:
    before = llm.stats()
    outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    after = llm.stats()
    assert after.num_generation_tokens - before.num_generation_tokens == 24
    assert after.num_prompt_tokens - before.num_prompt_tokens == sum(len(o.prompt_token_ids) for o in outputs)
    assert after.num_finished["length"] - before.num_finished.get("length", 0) == 4
    assert (after.scheduler.num_running, after.scheduler.num_waiting, after.scheduler.kv_cache_usage) == (0, 0, 0.0)
    for metrics in (output.metrics for output in outputs):
        assert metrics.num_generation_tokens == 6
        assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts < metrics.last_token_ts
        assert metrics.first_token_latency > 0 and metrics.time_per_output_token > 0


def test_prompts_of_any_text(llm: LLM) -> None:
    texts = ["😀", "你好", "\x00", " ", "\n\n", "<|begin|><|end|>", "a" * 500, "é" * 50, "�"]
    outputs = run_requests(llm.llm_engine, {text: (text, SamplingParams(max_tokens=3)) for text in texts})
    assert all(outputs[text].prompt == text and outputs[text].outputs[0].token_ids for text in texts)


def test_two_engines_in_one_process(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    with LLM("story-llama", max_num_seqs=2, max_model_len=64, block_size=4, enforce_eager=True, seed=3) as other:
        assert [output.outputs for output in other.generate(PROMPTS, params, use_tqdm=False)] == expected
    # the end of one does not affect the other
    assert [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)] == expected


def test_paths_torch_dtypes_and_names_of_the_tokenizer(text_model: Path) -> None:
    with LLM(text_model, tokenizer=text_model, dtype=torch.float32, max_num_seqs=2) as llm:
        assert llm.config.dtype == "float32"
        assert llm.config.model == llm.config.tokenizer == str(text_model)
        tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.apply_chat_template(CONVERSATION).input_ids == token_ids
    assert tokenizer("Hello")["input_ids"] == tokenizer.encode("Hello")
    assert len(tokenizer) == tokenizer.vocab_size


def test_chat(llm: LLM) -> None:
    params, tokenizer = SamplingParams(temperature=0, max_tokens=12), llm.get_tokenizer()
    (single,) = llm.chat(CONVERSATION, params, use_tqdm=False)
    assert single.prompt == tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    # one begin-of-text token: the template writes it, and the tokenizer must not write it once more
    assert single.prompt_token_ids.count(tokenizer.bos_token_id) == 1
    first, second = llm.chat([CONVERSATION, CONVERSATION[:2]], sampling_params=params, use_tqdm=False)
    assert first.outputs[0].token_ids == single.outputs[0].token_ids
    assert second.prompt_token_ids != first.prompt_token_ids
    going_on: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert str(llm.chat(CONVERSATION[:3], params, use_tqdm=False, **going_on)[0].prompt).endswith("today?")
    given: dict[str, Any] = {"chat_template_kwargs": going_on}
    assert str(llm.chat(CONVERSATION[:3], params, use_tqdm=False, **given)[0].prompt).endswith("today?")
    template: dict[str, Any] = {"chat_template": TEMPLATE, "chat_template_kwargs": {"sign": "!"}}
    (own,) = llm.chat(CONVERSATION, params, use_tqdm=False, **template)
    assert str(own.prompt).startswith("You are a helpful assistant!Hello!")


def test_arguments_stand_where_vllm_has_them() -> None:
    generate = list(inspect.signature(LLM.generate).parameters.values())[1:]
    assert [parameter.name for parameter in generate[:2]] == ["prompts", "sampling_params"]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in generate[2:-1])
    assert list(inspect.signature(LLM.chat).parameters)[1:11] == [
        "messages", "sampling_params", "use_tqdm", "lora_request", "chat_template", "chat_template_content_format",
        "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs",
    ]  # fmt: skip


def test_neutral_keywords_change_nothing(llm: LLM) -> None:
    (expected,) = llm.generate("Once", greedy(4), use_tqdm=False)
    (output,) = llm.generate("Once", greedy(4), use_tqdm=False, lora_request=None, tokenization_kwargs=None)
    assert output.outputs == expected.outputs
    (expected,) = llm.chat(CONVERSATION, greedy(4), use_tqdm=False, chat_template=TEMPLATE)
    (output,) = llm.chat(CONVERSATION, greedy(4), False, None, TEMPLATE, "auto", True, mm_processor_kwargs=None)
    assert (output.prompt, output.outputs) == (expected.prompt, expected.outputs)


def test_other_keywords_are_refused_and_nothing_runs(llm: LLM) -> None:
    before = llm.stats().num_steps
    keywords: dict[str, Any] = {"lora_request": "adapter", "sampling_parameters": None, "nonsense": None}
    messages = ("LoRA adapters are not served", "did you mean 'sampling_params'", "it takes")
    for (name, value), message in zip(keywords.items(), messages, strict=True):
        with pytest.raises(TypeError, match=f"LLM.generate got an unknown keyword '{name}'; {message}"):
            llm.generate("Once", use_tqdm=False, **{name: value})
        with pytest.raises(TypeError, match=f"LLM.chat got an unknown keyword '{name}'; {message}"):
            llm.chat(CONVERSATION, use_tqdm=False, chat_template=TEMPLATE, **{name: value})
    assert llm.stats().num_steps == before


def test_the_step_by_step_engine() -> None:
    """What vLLM's `LLMEngine` example does."""
    engine = LLMEngine.from_config(EngineConfig(max_num_seqs=4))
    engine.add_request("0", "A robot may not injure a human being", SamplingParams(temperature=0.0, max_tokens=8))
    engine.add_request("1", "To be or not to be,", SamplingParams(temperature=0.8, top_k=5, n=2, max_tokens=8))
    outputs = drain(engine)
    assert len(outputs) > 2
    finished = {output.request_id: output for output in outputs if output.finished}
    assert {name: len(output.outputs) for name, output in finished.items()} == {"0": 1, "1": 2}
    assert engine.step() == []
    engine.shutdown()


def test_a_request_that_was_added_to_the_engine_does_not_disturb_generate(llm: LLM) -> None:
    llm.llm_engine.add_request("stranger", "Once upon", SamplingParams(max_tokens=1))
    (output,) = llm.generate("The fox", greedy(5), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
@pytest.mark.parametrize("is_changed", [False, True])
def test_outputs_are_not_changed_by_later_steps(kind: RequestOutputKind, is_changed: bool, text_model: Path) -> None:
    """Nor does a change of them by the user affect later ones."""
    engine = make_engine(text_model, max_num_batched_tokens=8, max_num_seqs=4, block_size=4)  # several steps a prompt
    params = SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1, output_kind=kind)
    engine.add_request("r", prompt_of(30, TEXT_MODEL["vocab_size"]), params)
    engine.add_request("s", prompt_of(5, TEXT_MODEL["vocab_size"]), SamplingParams(max_tokens=3, output_kind=kind))
    returned, copies = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            returned.append(output)
            copies.append(copy.deepcopy(output))
            if is_changed:
                output.metrics.first_token_ts = output.metrics.queued_ts = -1.0
                output.outputs[0].token_ids.clear()
    engine.shutdown()
    assert is_changed or returned == copies
    assert len({id(output.metrics) for output in returned}) == len(returned)
    own = [output for output in copies if output.request_id == "r"]
    counts, last = [output.metrics.num_generation_tokens for output in own], own[-1]
    assert len(counts) > 6 and counts == sorted(counts) and counts[0] < counts[-1] == 12
    assert 0 < last.metrics.queued_ts <= last.metrics.first_token_ts < last.metrics.last_token_ts
    assert own[0].metrics.last_token_ts < last.metrics.last_token_ts
    lengths = [len(output.prompt_logprobs or []) for output in own]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == 30
    if kind is RequestOutputKind.CUMULATIVE:
        assert [len(completion.token_ids) for completion in last.outputs] == [6, 6]


def watched(llm: LLM) -> mock.Mock:
    """Records the calls of these two methods of the engine."""
    engine = llm.llm_engine
    watch = mock.Mock(**{"submit.side_effect": engine.submit, "step.side_effect": engine.step})
    vars(engine).update(submit=watch.submit, step=watch.step)
    return watch


FULL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_model_len": 64, "dtype": "float32"}


@pytest.mark.parametrize("use_v2", [False, True])
def test_a_step_that_is_full_begins_before_the_last_prompts_are_added(use_v2: bool) -> None:
    prompts = [[5 + number] * 12 for number in range(7)]
    params = [greedy(1 + 3 * number) for number in range(7)]
    results = []
    for policy in ("fcfs", "priority"):  # by which a step depends on what is queued behind it
        with LLM(use_v2_model_runner=use_v2, scheduling_policy=policy, **FULL_STEPS) as llm:
            watch = watched(llm)
            results.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            llm.llm_engine.check_integrity()
        calls = [call[0] for call in watch.mock_calls]
        begun = calls[: calls.index("step")].count("submit")
        assert begun == (3 if policy == "fcfs" else 7)
        assert calls[:8].count("step") == 1
    assert results[0] == results[1]
    assert [len(token_ids) for token_ids in results[0]] == [1 + 3 * number for number in range(7)]


def test_a_prompt_that_is_refused_behind_a_step_ends_the_call() -> None:
    with LLM(**FULL_STEPS) as llm:
        watch = watched(llm)
        with pytest.raises(ValueError, match="max_model_len"):
            llm.generate([[5] * 12] * 6 + [[5] * 90], SamplingParams(max_tokens=9), use_tqdm=False)
        watch.step.assert_called()
        assert not llm.llm_engine.has_unfinished_requests()
        llm.llm_engine.check_integrity()
        assert len(llm.generate([[5] * 12] * 6, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)) == 6
