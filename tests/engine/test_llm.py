"""Scripts as they are written for vLLM, on the embedded model, with nothing changed but the import."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import TEXT_MODEL, drain, make_engine, prompt_of

from fleetfoot import LLM, EngineConfig, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
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
