"""The end of a request: stop strings are never in the text, not even in part, however tokens and steps cut it.

Steps with several tokens give the output of steps with one token, also where a request ends in the middle of a step.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.engines import EOS, ScriptedExecutor, drain, make_engine, prompt_of, scripted_engine

from fleetfoot import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.records.step import ModelRunnerOutput, RowLogprobs
from fleetfoot.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(embedded_model_path())
TEXT = "The fox said: STOP it now! Grüße, 你好 😀. STOPPED, and the END of it."
TOKENS = TOKENIZER.encode(TEXT, add_special_tokens=False)
DELTAS: dict[str, Any] = {"ignore_eos": True, "output_kind": RequestOutputKind.DELTA}


def drain_and_check(engine: LLMEngine) -> list[RequestOutput]:
    outputs = drain(engine)
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.config.num_blocks
    return outputs


def play(tokens: list[int], **params: Any) -> list[RequestOutput]:
    """The deltas of a request for which the model samples ``tokens``."""
    engine = scripted_engine(ScriptedExecutor({"r": tokens}), tokenizer=TOKENIZER)
    engine.add_request("r", [5, 6], SamplingParams(**DELTAS, max_tokens=len(tokens), **params))
    return drain_and_check(engine)


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.outputs[0].token_ids]


COUNT = len(TOKENIZER.encode(TEXT[: TEXT.index("STOP") + 4], add_special_tokens=False))
"""Tokens up to the first STOP."""


@pytest.mark.parametrize(
    ("stop", "hit", "min_tokens"),
    [
        (["STOP"], "STOP", 0),
        (["STOPPED"], "STOPPED", 0),  # the first STOP begins it, and does not match
        (["PPED, a", "zebra"], "PPED, a", 0),  # from the middle of a token to the middle of another
        (["好 😀"], "好 😀", 0),  # characters that are several tokens each
        (["it.", "END", "nothing"], "END", 0),
        ([" it now", "STOP it"], "STOP it", 0),  # the one that ends first
        (["T"], "T", 0),
        (["STOP"], "STOP", COUNT - 1),
        (["STOP"], "STOP", COUNT + 3),
        (["T", "The fox"], "T", 0),
        ([TEXT], TEXT, 0),
        (["."], ".", 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("include", [False, True], ids=["cut", "kept"])
def test_stop_strings(stop: list[str], hit: str, min_tokens: int, include: bool) -> None:
    outputs = play(TOKENS, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    end = (TEXT.rindex(hit) if min_tokens > COUNT else TEXT.index(hit)) + len(hit)
    assert text_of(outputs) == (TEXT[:end] if include else TEXT[: end - len(hit)])
    assert outputs[-1].finished
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", hit)
    # the tokens are those up to the one that completed the stop string, whole
    tokens = tokens_of(outputs)
    assert tokens == TOKENS[: len(tokens)]
    assert TOKENIZER.decode(tokens).startswith(TEXT[:end])
    assert not TOKENIZER.decode(tokens[:-1]).startswith(TEXT[:end])


@pytest.mark.parametrize("ending", ["length", "stop", "abort"])
def test_held_back_text_is_released_at_the_end(ending: str) -> None:
    cut = TOKENIZER.encode("all is well, STOP", add_special_tokens=False)[:-1]
    text = TOKENIZER.decode(cut)
    assert text.startswith("all is well, S")
    engine = scripted_engine(ScriptedExecutor({"r": [*cut, EOS]}), tokenizer=TOKENIZER)
    engine.add_request("r", [5], SamplingParams(max_tokens=len(cut) + (ending != "length"), stop=["STOP"]))
    for _ in cut[:-1]:
        (output,) = engine.step()
        assert "S" not in output.outputs[0].text
    if ending == "abort":
        engine.step()
        engine.abort_request("r")
    completion = drain(engine)[-1].outputs[0]
    assert (completion.finish_reason, completion.stop_reason, completion.text) == (ending, None, text)
    assert completion.token_ids == cut + [EOS] * (ending == "stop")


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    engine = scripted_engine(ScriptedExecutor({"r": TOKENS}), tokenizer=TOKENIZER)
    engine.add_request("r", "STOP STOP ST", SamplingParams(max_tokens=4, stop=["STOP"]))
    completion = drain(engine)[-1].outputs[0]
    assert (completion.finish_reason, completion.text) == ("length", TOKENIZER.decode(TOKENS[:4]))


def test_each_sequence_of_a_request_stops_by_itself() -> None:
    script = {"r\x1f0": TOKENS, "r\x1f1": TOKENS[::-1], "r\x1f2": TOKENS[5:]}
    engine = scripted_engine(ScriptedExecutor(script), tokenizer=TOKENIZER)
    params = SamplingParams(n=3, max_tokens=len(TOKENS) - 5, stop=["STOPPED"], output_kind=RequestOutputKind.CUMULATIVE)
    engine.add_request("r", [5, 6], params)
    outputs = drain(engine)
    last = outputs[-1]
    assert [completion.finish_reason for completion in last.outputs] == ["stop", "length", "stop"]
    assert last.outputs[0].text == TEXT[: TEXT.index("STOPPED")]
    assert last.outputs[2].text == last.outputs[0].text.removeprefix(TOKENIZER.decode(TOKENS[:5]))
    assert last.outputs[1].token_ids == script["r\x1f1"][: len(TOKENS) - 5]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@settings(max_examples=60)
@given(data=st.data())
def test_any_text_cut_anywhere(data: st.DataObject) -> None:
    """Random tokens and random pieces of their text as stop strings: the deltas are the text before the first match."""
    alphabet = TOKENIZER.encode("ab STOP é😀\n", add_special_tokens=False)
    tokens = data.draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=25))
    text = text_of(play(tokens))
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = [text[begin : begin + data.draw(st.integers(1, 4))], data.draw(st.sampled_from(["aS", "ST", "b b", "é"]))]
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    hit = max((s for s in stop if text[: ends[0]].endswith(s)), key=len)
    outputs = play(tokens, stop=stop)
    if "\ufffd" not in hit:  # unfinished bytes become a character at the end, and then stop nothing
        assert text_of(outputs) == text[: ends[0] - len(hit)]
        assert outputs[-1].outputs[0].stop_reason == hit


def test_a_real_model_stops(text_model: Path) -> None:
    """With real sampling, the stop strings are parts of the request's text without them."""
    engine = make_engine(text_model)
    for seed in range(6):
        prompt = prompt_of(4 + seed, 2048, seed=seed)
        params: dict[str, Any] = {"seed": seed, "max_tokens": 60, **DELTAS}
        engine.add_request("free", prompt, SamplingParams(**params))
        text = text_of(drain(engine))
        stop = [text[len(text) // 3 :][:5], text[len(text) // 2 :][:3]]
        end = min(text.index(s) + len(s) for s in stop)
        hit = max((s for s in stop if text[:end].endswith(s)), key=len)
        expected = {"cut": text[: end - len(hit)], "kept": text[:end]}
        for name in expected:
            stops = {"stop": stop, "include_stop_str_in_output": name == "kept"}
            engine.add_request(name, prompt, SamplingParams(**params, **stops))
        outputs = drain(engine)
        for name, shown in expected.items():
            mine = [output for output in outputs if output.request_id == name]
            assert (text_of(mine), mine[-1].outputs[0].stop_reason) == (shown, hit)
    engine.shutdown()


class RunsExecutor(ScriptedExecutor):
    """Accepts a random number of drafts of each decode; a device has lengths, and no stop tokens."""

    def __init__(self, script: dict[str, list[int]], rng: random.Random) -> None:
        super().__init__(script)
        self.rng = rng

    def sample_tokens(self, grammar_output: object | None) -> ModelRunnerOutput:
        assert self._step is not None
        step, self._step = self._step, None
        result = ModelRunnerOutput([])
        for index, row in enumerate(step.rows[: step.num_sampled]):
            request = self._rows[row]
            most = 1 + step.num_drafts if index < step.num_decodes else 1
            count = min(request.max_total_tokens - len(request.token_ids), self.rng.randint(1, most))
            done = len(request.token_ids) - request.num_prompt_tokens
            new = [*self.script[request.request_id], *[0] * 100][done : done + count]
            request.token_ids.extend(new)
            result.sampled_token_ids.append(new)
            if request.params.logprobs is not None:
                result.logprobs[index] = [RowLogprobs([token], [-0.5 * token], 1).pack() for token in new]
        return result


def play_runs(num_drafts: int, rng: random.Random, depth: int = 0, **params: Any) -> list[RequestOutput]:
    engine = scripted_engine(
        RunsExecutor({"r": TOKENS}, rng), tokenizer=TOKENIZER, num_drafts=num_drafts, depth=depth, block_size=2
    )
    engine.add_request("r", [5, 6], SamplingParams(**{"max_tokens": len(TOKENS), "ignore_eos": True, **params}))
    outputs = drain_and_check(engine)
    num_tokens = engine.stats().num_generation_tokens
    assert num_tokens == max(output.metrics.num_generation_tokens for output in outputs)
    return outputs


STOPS = ["STOP", "STOPPED", "PPED, a", "好 😀", "END", ".", "T", "it", "nothing"]
ENDS = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.lists(st.sampled_from(STOPS), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.lists(st.sampled_from(TOKENS), max_size=2),
        "min_tokens": st.integers(0, len(TOKENS)),
        "max_tokens": st.integers(1, len(TOKENS)),
        "skip_special_tokens": st.booleans(),
    },
)


@settings(max_examples=60, deadline=None)
@given(ends=ENDS, num_drafts=st.integers(1, 6), depth=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_a_request_ends_as_with_single_tokens(ends: dict[str, Any], num_drafts: int, depth: int, seed: int) -> None:
    ends = {**ends, "min_tokens": min(ends.get("min_tokens", 0), ends.get("max_tokens", len(TOKENS)))}
    ends |= {"output_kind": RequestOutputKind.FINAL_ONLY, "logprobs": 0}
    rng = random.Random(seed)
    (expected,) = play_runs(0, rng, **ends)
    (got,) = play_runs(num_drafts, rng, depth, **ends)
    mine, other = got.outputs[0], expected.outputs[0]
    assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob)
    assert replace(mine, cumulative_logprob=None) == replace(other, cumulative_logprob=None)
    assert mine.logprobs is not None and len(mine.logprobs) == len(mine.token_ids)


@pytest.mark.parametrize("depth", [0, 1])
def test_deltas_join_to_the_whole(depth: int) -> None:
    outputs = play_runs(4, random.Random(1), depth, stop=["END"], output_kind=RequestOutputKind.DELTA, logprobs=0)
    tokens = tokens_of(outputs)
    entries = [entry for output in outputs for entry in output.outputs[0].logprobs or []]
    assert tokens == TOKENS[: len(tokens)]
    assert [next(iter(entry)) for entry in entries] == tokens
    assert text_of(outputs) == TEXT[: TEXT.index("END")]
    assert len(outputs) < len(tokens)
    assert outputs[-1].outputs[0].stop_reason == "END"


def test_an_end_token_in_the_middle_of_a_run() -> None:
    class All(random.Random):
        def randint(self, a: int, b: int) -> int:
            return b

    engine = scripted_engine(RunsExecutor({"r": [10, 11, EOS, 12, 13]}, All()), tokenizer=TOKENIZER, num_drafts=5)
    engine.add_request("r", [5], SamplingParams(max_tokens=20, logprobs=0))
    outputs = drain(engine)
    last = outputs[-1].outputs[0]
    assert (last.token_ids, last.finish_reason, last.stop_reason) == ([10, 11, EOS], "stop", None)
    assert last.logprobs is not None
    assert [next(iter(entry)) for entry in last.logprobs] == [10, 11, EOS]
    assert last.text == TOKENIZER.decode([10, 11])
    drafts = engine.stats().drafts
    assert (drafts.num_drafted, drafts.num_accepted, drafts.mean_acceptance_length) == (5, 5, 6.0)
