"""Engines with the added tokens of a real tokenizer: calls, constraints, reasoning; both runners, with drafts too."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import TEXT_MODEL

from fleetfoot import LLM, SamplingParams

ASSETS = Path(__file__).parents[1] / "assets"
VOCAB_SIZE = 600
UNSEEN_END = 599
"""An end token outside the tokenizer's vocabulary."""
ASK = [{"role": "user", "content": "What is the weather?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "<think>"]}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in ("mood", "sky")
]
NAMED = {"type": "function", "function": {"name": "sky"}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(
        folder,
        "llama",
        **TEXT_MODEL | {"vocab_size": VOCAB_SIZE, "eos_token_id": UNSEEN_END, "max_position_embeddings": 1024},
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "tokenizer-qwen3" / name, folder / name)
    return folder


@pytest.fixture(scope="module", params=[("v1", None), ("v2", None), ("v1", NGRAM), ("v2", NGRAM)], ids=str)
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    runner, drafts = request.param
    with LLM(model, device="cpu", max_num_seqs=4, model_runner=runner, speculative_config=drafts) as made:
        yield made


def likely(llm: LLM, *tokens: str, **options: Any) -> SamplingParams:
    """Parameters with which these tokens come wherever they may."""
    bias = {llm.get_tokenizer().get_vocab()[token]: 50.0 for token in tokens}
    return SamplingParams(max_tokens=150, temperature=1, seed=2, logit_bias=bias, **options)


def test_the_end_tokens_are_those_of_the_config_and_of_the_tokenizer(llm: LLM) -> None:
    end = llm.get_tokenizer().get_vocab()["<|im_end|>"]
    assert llm.llm_engine.input_processor.eos_token_ids == {end, UNSEEN_END}
    for token in (end, UNSEEN_END):
        for least, ends in ((0, True), (5, False)):
            params = SamplingParams(max_tokens=8, min_tokens=least, logit_bias={token: 100.0}, temperature=0)
            (output,) = llm.generate("Rome", params, use_tqdm=False)[0].outputs
            assert (output.finish_reason == "stop" and len(output.token_ids) == 1) == ends
            assert not {end, UNSEEN_END} & {*output.token_ids[: max(least, 0)][:-1]}
        params = SamplingParams(max_tokens=4, ignore_eos=True, logit_bias={token: 100.0}, temperature=0)
        assert llm.generate("Rome", params, use_tqdm=False)[0].outputs[0].token_ids == [token] * 4


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_is_forced(llm: LLM, choice: Any) -> None:
    vocab = llm.get_tokenizer().get_vocab()
    params = likely(llm, "</think>")
    (output,) = llm.chat(ASK, params, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, use_tqdm=False)
    (message,) = llm.parse_chat(output, TOOLS)
    (call,) = message.tool_calls
    assert call.name == "sky" or choice == "required"
    assert json.loads(call.arguments)["city"] in ("Rome", "<think>")
    assert vocab["<tool_call>"] in output.outputs[0].token_ids and output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        ({"choice": ["<think>x", "<tool_call>"]}, ["<think>x", "<tool_call>"]),
        ({"regex": "<tool_call>x"}, ["<tool_call>x"]),
        ({"json": {"enum": ["<think>", "<|im_end|>"]}}, ['"<think>"', '"<|im_end|>"']),
        ({"grammar": 'start: "<|im_start|>" "<think>"'}, ["<|im_start|><think>"]),
    ],
    ids=["choice", "regex", "enum", "lark"],
)
def test_texts_like_marks(llm: LLM, constraint: dict[str, Any], texts: list[str]) -> None:
    params = SamplingParams(max_tokens=60, temperature=1, seed=1, n=4, structured_outputs=constraint)
    for output in llm.generate("Rome", params, use_tqdm=False)[0].outputs:
        assert output.text in texts and output.finish_reason == "stop"


def test_a_regex_that_becomes_too_large_ends_its_own_request(llm: LLM) -> None:
    regex = "((a{1,100}){1,100}){1,100}"
    large = SamplingParams(max_tokens=300, ignore_eos=True, seed=1, structured_outputs={"regex": regex})
    free = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
    (alone,) = llm.generate("Rome", free, use_tqdm=False)
    first, second = llm.generate(["Rome", "Rome"], [large, free], use_tqdm=False)
    assert first.outputs[0].finish_reason == "error" and first.outputs[0].is_unfit
    assert second.outputs[0].token_ids == alone.outputs[0].token_ids and not second.outputs[0].is_unfit
