"""Calls of `LLM` as scripts for vLLM make them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetfoot import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CONVERSATION = [{"role": "user", "content": "Once upon a time there was a fox"}]


@pytest.fixture(scope="module")
def llm(text_model: Path) -> Iterator[LLM]:
    with LLM(
        model=str(text_model), tokenizer=str(text_model), seed=1, gpu_memory_utilization=0.5, max_num_seqs=4,
        block_size=4, device="cpu",
    ) as llm:  # fmt: skip
        yield llm


def test_arguments_stand_where_vllm_has_them() -> None:
    generate = list(inspect.signature(LLM.generate).parameters.values())[1:]
    assert [parameter.name for parameter in generate[:2]] == ["prompts", "sampling_params"]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in generate[2:-1])
    assert list(inspect.signature(LLM.chat).parameters)[1:11] == [
        "messages", "sampling_params", "use_tqdm", "lora_request", "chat_template", "chat_template_content_format",
        "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs",
    ]  # fmt: skip


def test_keywords_that_ask_for_nothing_change_nothing(llm: LLM) -> None:
    (expected,) = llm.generate("Once", GREEDY, use_tqdm=False)
    (output,) = llm.generate("Once", GREEDY, use_tqdm=False, lora_request=None, tokenization_kwargs=None)
    assert output.outputs == expected.outputs
    (expected,) = llm.chat(CONVERSATION, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    (output,) = llm.chat(CONVERSATION, GREEDY, False, None, TEMPLATE, "auto", True, mm_processor_kwargs=None)
    assert (output.prompt, output.outputs) == (expected.prompt, expected.outputs)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lora_request": "adapter"}, "'lora_request'; LoRA adapters are not served"),
        ({"sampling_parameters": GREEDY}, r"'sampling_parameters'; did you mean 'sampling_params'\?"),
        ({"nonsense": None}, "'nonsense'; it takes"),
    ],
    ids=str,
)
def test_other_keywords_are_refused_and_nothing_runs(keywords: dict[str, Any], message: str, llm: LLM) -> None:
    before = llm.stats().num_steps
    with pytest.raises(TypeError, match=rf"LLM.generate got an unknown keyword {message}"):
        llm.generate("Once", use_tqdm=False, **keywords)
    with pytest.raises(TypeError, match=rf"LLM.chat got an unknown keyword {message}"):
        llm.chat(CONVERSATION, use_tqdm=False, chat_template=TEMPLATE, **keywords)
    assert llm.stats().num_steps == before


def test_a_cache_salt_keeps_prompts_apart(llm: LLM) -> None:
    token_ids = list(range(5, 30))

    def cached(prompt: Any) -> int:
        return llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert cached({"prompt_token_ids": token_ids, "cache_salt": "mine"}) == 0
    assert cached({"prompt_token_ids": token_ids}) == 0
    assert cached({"prompt_token_ids": token_ids, "cache_salt": "mine"}) == 24
    text = llm.get_tokenizer().decode(token_ids)
    assert cached({"prompt": text, "cache_salt": "theirs"}) == 0
    assert cached({"prompt": text, "cache_salt": "theirs"}) > 0
