"""Structured outputs on both runners: tokens are those of transformers' logits under the same masks, on every path."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tests.helpers.engines import EOS, TEXT_MODEL, make_engine, prompt_of, run_requests
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.streams import assert_idle, async_test, submit

from fleetfoot import LLM, AsyncLLM, EngineConfig, LLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from fleetfoot.engine.child_process import EngineProcess
from fleetfoot.engine.client import EngineClient
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.runner.v2 import runner as v2
from fleetfoot.speculative.controller import AdaptiveDrafts
from fleetfoot.tokenizer.tokenizer import Tokenizer

VOCAB = TEXT_MODEL["vocab_size"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "owl"]}, "maxItems": 2},
        "note": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA, "disable_any_whitespace": True},
    "spaced": {"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"},
    "regex": {"regex": r"[a-c]{2,9}-\d{3}"},
    "choice": {"choice": ["positive", "negative", "no opinion"]},
    "lark": {"grammar": 'start: "(" WORD ("," WORD)~2 ")"\nWORD: /[a-z]{1,4}/'},
    "gbnf": {"grammar": 'root ::= "<" [0-9]+ ">"'},
}
LONG = SamplingParams(structured_outputs={"regex": "[a-z]{900}"}, max_tokens=200)
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
OVERLAP = {"async_scheduling": True}
PATHS: dict[str, dict[str, Any]] = {"overlapped": OVERLAP, "ngram": {**NGRAM, **OVERLAP}}


def requests() -> dict[str, tuple[Any, SamplingParams]]:
    """Each constraint greedy and sampled, beside requests without one."""
    made: dict[str, tuple[Any, SamplingParams]] = {}
    for seed, (name, constraint) in enumerate(CONSTRAINTS.items()):
        prompt = prompt_of(5 + 4 * seed, VOCAB, seed)
        params = {"max_tokens": 50, "structured_outputs": constraint}
        made[name] = prompt, SamplingParams(temperature=0, **params)
        made[f"{name}-random"] = prompt, SamplingParams(temperature=1, seed=seed, n=1 + seed % 2, **params)
        made[f"{name}-free"] = prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    return made


def tokens_of(outputs: dict[str, RequestOutput]) -> dict[str, list[tuple[Sequence[int], str | None]]]:
    return {
        name: [(completion.token_ids, completion.finish_reason) for completion in output.outputs]
        for name, output in outputs.items()
    }


def assert_fits(constraint: dict[str, Any], text: str) -> None:
    """Check a whole output by other means than the grammar's compiler."""
    if "json" in constraint:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif "choice" in constraint:
        assert text in constraint["choice"]
    else:
        patterns = {"regex": r"[a-c]{2,9}-\d{3}", "lark": r"\([a-z]{1,4}(,[a-z]{1,4}){2}\)", "gbnf": r"<[0-9]+>"}
        kind = "regex" if "regex" in constraint else "gbnf" if "::=" in constraint["grammar"] else "lark"
        assert re.fullmatch(patterns[kind], text), text


@pytest.fixture(scope="module")
def engines(text_model: Path) -> Iterator[dict[str, LLMEngine]]:
    """Of each runner, with all else at its default."""
    made = {name: make_engine(text_model, model_runner=name) for name in ("v1", "v2")}
    yield made
    for engine in made.values():
        engine.shutdown()


@pytest.fixture(scope="module")
def expected(engines: dict[str, LLMEngine]) -> dict[str, Any]:
    """What Model Runner V1 yields for `requests`, one at a time."""
    outputs: dict[str, RequestOutput] = {}
    for name, request in requests().items():
        outputs |= run_requests(engines["v1"], {name: request})
    for name, output in outputs.items():
        constraint = CONSTRAINTS.get(name.removesuffix("-random"))
        for completion in output.outputs if constraint else ():
            assert completion.finish_reason in ("stop", "length")
            if completion.finish_reason == "stop":
                assert_fits(constraint or {}, completion.text)
    finished = [completion.finish_reason for output in outputs.values() for completion in output.outputs]
    assert finished.count("stop") > 8
    return tokens_of(outputs)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_tokens_are_those_of_transformers_under_the_same_masks(
    name: str, text_checkpoint: tuple[Path, Any], expected: dict[str, Any]
) -> None:
    folder, reference = text_checkpoint
    tokenizer = Tokenizer.from_path(folder)
    masks = LLTokenizer(tokenizer.backend.to_str(), n_vocab=VOCAB, eos_token=EOS)
    constraint = CONSTRAINTS[name]
    if "json" in constraint:
        spaces = {"whitespace_pattern": " ?"} if name == "spaced" else {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides=spaces)
    elif "regex" in constraint:
        grammar = LLMatcher.grammar_from_regex(constraint["regex"])
    elif "choice" in constraint:
        grammar = LLMatcher.grammar_from_regex("|".join(constraint["choice"]))
    else:
        lark = {"gbnf": 'start: "<" /[0-9]+/ ">"'}.get(name, constraint["grammar"])
        grammar = LLMatcher.grammar_from_lark(lark)
    matcher = LLMatcher(masks, grammar)
    prompt, params = requests()[name]
    tokens, finish_reason = list(prompt), "length"
    while len(tokens) < len(prompt) + (params.max_tokens or 0):
        logits = reference(torch.tensor([tokens])).logits[0, -1].float()
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), count=VOCAB, bitorder="little")
        logits[torch.from_numpy(allowed == 0)] = -torch.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == EOS:
            finish_reason = "stop"
            break
        assert matcher.consume_token(tokens[-1])
    assert expected[name] == [(tokens[len(prompt) :], finish_reason)]


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_masks_are_read_by_a_graph_behind_that_of_the_forward_pass(
    num_drafts: int, text_model: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = RecordingDevice(has_graphs=True)
    monkeypatch.setattr(v2, "open_device", lambda *_: device)
    shapes = CaptureTable.of(
        device="cuda", enforce_eager=False, max_num_seqs=8, max_num_batched_tokens=64, num_drafts=num_drafts
    )
    monkeypatch.setattr(CaptureTable, "of", lambda **_: shapes)
    turns = cycle([num_drafts, num_drafts, 0])  # steps that propose none verify the drafts of the step before
    monkeypatch.setattr(AdaptiveDrafts, "choose", lambda *_: next(turns))
    drafts = {"method": "ngram", "num_speculative_tokens": num_drafts, "prompt_lookup_min": 1}
    settings: dict[str, Any] = {"speculative_config": drafts} if num_drafts else {}
    engine = make_engine(text_model, model_runner="v2", max_num_batched_tokens=64, **settings)
    attention = type(engine.core.executor._context.attention)  # type: ignore[attr-defined]
    monkeypatch.setattr(attention, "is_capturable", True)
    engine.shutdown()
    engine = make_engine(text_model, model_runner="v2", max_num_batched_tokens=64, **settings)
    assert tokens_of(run_requests(engine, requests())) == expected
    graphs = engine.core.executor.runner.graphs  # type: ignore[attr-defined]
    assert graphs.num_steps["uniform" if num_drafts else "decode"] > 20
    engine.shutdown()


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_logprobs_are_of_the_models_logits(kind: str, engines: dict[str, LLMEngine]) -> None:
    prompt = prompt_of(6, VOCAB)
    common = {"max_tokens": 1, "temperature": 0, "logprobs": 3}
    made = {
        "free": (prompt, SamplingParams(**common)),
        "bound": (prompt, SamplingParams(**common, structured_outputs={"choice": ["yes", "no"]})),
    }
    outputs = run_requests(engines[kind], made)
    first = {name: output.outputs[0].logprobs[0] for name, output in outputs.items()}  # type: ignore[index]
    sampled = outputs["bound"].outputs[0].token_ids[0]
    assert sampled not in first["free"]
    assert first["bound"].keys() - {sampled} == first["free"].keys()
    for token, entry in first["free"].items():
        assert entry.logprob == pytest.approx(first["bound"][token].logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "path", "marker"),
    [
        ("v1", "overlapped", "<|assistant|>"),
        ("v1", "ngram", "ab"),
        ("v2", "overlapped", "ab"),
        ("v2", "ngram", "<|assistant|>"),
    ],
)
def test_a_grammar_begins_after_reasoning(kind: str, path: str, marker: str, text_model: Path) -> None:
    tokenizer = Tokenizer.from_path(text_model)
    (end,) = tokenizer.encode(marker, add_special_tokens=False)
    engine = make_engine(text_model, model_runner=kind, **PATHS[path])
    prompt, choices = prompt_of(6, VOCAB), ["left", "right"]
    # a bad word keeps the marker out until the bias of the third token brings it
    params = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "skip_special_tokens": False}
    bound = {"choice": choices, "reasoning_end": marker}
    made = {
        "soon": (prompt, SamplingParams(**params, logit_bias={end: 9.0}, structured_outputs=bound)),
        "never": (prompt, SamplingParams(**params, bad_words=[marker], structured_outputs=bound)),
        "free": (prompt, SamplingParams(**params, bad_words=[marker])),
    }
    outputs = run_requests(engine, made)
    engine.shutdown()
    _, _, answer = outputs["soon"].outputs[0].text.partition(marker)
    assert answer.strip().removesuffix("<|end|>") in choices
    assert outputs["soon"].outputs[0].finish_reason == "stop"
    assert outputs["never"].outputs[0].token_ids == outputs["free"].outputs[0].token_ids


def test_llm_takes_them_and_refuses_what_cannot_be_compiled(text_model: Path) -> None:
    llm = LLM(str(text_model), device="cpu", max_num_seqs=4)
    params = SamplingParams(guided_decoding=StructuredOutputsParams(choice=["yes", "no"]), temperature=0)
    assert [output.outputs[0].text in ("yes", "no") for output in llm.generate(["a", "b"], params)] == [True, True]
    with pytest.raises(
        ValueError, match=r"json cannot be compiled: keywords that are not supported.*\(at #/properties/a"
    ):
        llm.generate("a", SamplingParams(structured_outputs={"json": {"properties": {"a": {"contains": {}}}}}))
    assert not llm.llm_engine.has_unfinished_requests()
    (too_large,) = llm.generate("a", SamplingParams(structured_outputs={"regex": "((a{100}){100}){100}"}))
    assert too_large.outputs[0].finish_reason == "error"
    error = str(too_large.outputs[0].stop_reason)  # without the state of the parser
    assert error == "the grammar cannot go on: lexer error: too many expressions constructed"
    without = make_engine(text_model, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        without.add_request("r", [5, 6], params)
    without.shutdown()


@async_test
async def test_streams_beside_requests_that_compile(text_model: Path, expected: dict[str, Any]) -> None:
    llm = AsyncLLM.from_engine(make_engine(text_model))
    tasks = {name: submit(llm, *request, name) for name, request in requests().items()}
    refused = submit(llm, [5, 6], SamplingParams(structured_outputs={"regex": "(?=a)"}), "refused")
    assert tokens_of({name: (await task)[-1] for name, task in tasks.items()}) == expected
    with pytest.raises(ValueError, match=r"regex cannot be compiled: .*look-around"):
        await refused
    assert_idle(llm)


LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
UNMET: list[tuple[Any, str]] = [
    ({"json": LOOP}, "structured_outputs has no output that fits it"),
    ({"grammar": "start: <|nothing|>"}, "structured_outputs.grammar cannot be compiled: .*unknown special token"),
    ({"regex": "(?=a)"}, "regex cannot be compiled: .*look-around"),
]
"""Constraints, of which the engine refuses the first two, and their errors."""


@async_test
async def test_an_engine_in_another_process(text_model: Path, expected: dict[str, Any]) -> None:
    process = EngineProcess(EngineConfig(model=str(text_model), device="cpu", max_num_seqs=8), logging.WARNING)
    client = EngineClient(process.address)
    try:
        await client.start()
        tasks = {name: submit(client, *request, name) for name, request in requests().items()}  # type: ignore[arg-type]
        assert tokens_of({name: (await task)[-1] for name, task in tasks.items()}) == expected
        for constraint, message in UNMET:
            with pytest.raises(ValueError, match=message):
                await client.submit([5, 6], SamplingParams(structured_outputs=constraint), "refused")
        assert client._grammars._vocabulary is None
        left = client.generate([5, 6], LONG, "left")
        await anext(left)
        await left.aclose()
        await client.stop()
    finally:
        client.close()
        process.stop()


@pytest.mark.parametrize("settings", [{}, NGRAM, OVERLAP, {**NGRAM, **OVERLAP}], ids=str)
def test_a_restart_reads_the_outputs_again(
    settings: dict[str, Any], text_model: Path, expected: dict[str, Any]
) -> None:
    """Workers fail twice; tokens that were lost with them are sampled again, from matchers that go back. With steps in
    flight, matchers have consumed tokens that no output has."""
    engine = make_engine(text_model, on_error="restart", **{"async_scheduling": False, **settings})
    failing, steps = {4, 11}, count()

    def fail_sometimes(runner: Any) -> None:
        sample = runner._sample

        def sample_or_fail(masks: Any) -> Any:
            pending = sample(masks)
            if next(steps) in failing:
                raise RuntimeError("the device is lost")
            return pending

        runner._sample = sample_or_fail

    start = v2.ModelRunnerV2.warm_up

    def warm_up(runner: Any) -> None:
        start(runner)
        fail_sometimes(runner)

    fail_sometimes(engine.core.executor.runner)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2.ModelRunnerV2, "warm_up", warm_up)
        assert tokens_of(run_requests(engine, requests())) == expected
    assert engine.stats().num_restarts == 2
    engine.shutdown()


def test_the_examples_of_the_documentation(text_model: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "structured_outputs.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {"model": text_model}
    for name in ("schema", "others"):
        (example,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", page, re.DOTALL)
        exec(example, scope)
    with scope["llm"]:
        jsonschema.validate(json.loads(scope["output"].text), scope["schema"])
        choice, number, names = (output.outputs[0].text for output in scope["outputs"])
    assert choice in ("positive", "negative")
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", number) and re.fullmatch(r"[a-z]{2,5}(,[a-z]{2,5}){1,2}", names)
