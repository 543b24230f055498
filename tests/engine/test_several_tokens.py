"""Steps with several tokens of a request: the output is that of single tokens, whatever ends it in the middle."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.engines import EOS, ScriptedExecutor, drain, scripted_engine

from fleetfoot import RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.records.step import ModelRunnerOutput, RowLogprobs
from fleetfoot.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(embedded_model_path())
TEXT = "The fox said: STOP it now! Grüße, 你好 😀. STOPPED, and the END of it."
TOKENS = TOKENIZER.encode(TEXT, add_special_tokens=False)


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
                result.logprobs[index] = [RowLogprobs([token], [-0.5 * token], 1) for token in new]
        return result


def play(num_drafts: int, rng: random.Random, depth: int = 0, **params: Any) -> list[RequestOutput]:
    engine = scripted_engine(
        RunsExecutor({"r": TOKENS}, rng), tokenizer=TOKENIZER, num_drafts=num_drafts, depth=depth, block_size=2
    )
    engine.add_request("r", [5, 6], SamplingParams(**{"max_tokens": len(TOKENS), "ignore_eos": True, **params}))
    outputs = drain(engine)
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.config.num_blocks
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


@settings(max_examples=150, deadline=None)
@given(ends=ENDS, num_drafts=st.integers(1, 6), depth=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_a_request_ends_as_with_single_tokens(ends: dict[str, Any], num_drafts: int, depth: int, seed: int) -> None:
    ends = {**ends, "min_tokens": min(ends.get("min_tokens", 0), ends.get("max_tokens", len(TOKENS)))}
    ends |= {"output_kind": RequestOutputKind.FINAL_ONLY, "logprobs": 0}
    rng = random.Random(seed)
    (expected,) = play(0, rng, **ends)
    (got,) = play(num_drafts, rng, depth, **ends)
    mine, other = got.outputs[0], expected.outputs[0]
    assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob)
    assert replace(mine, cumulative_logprob=None) == replace(other, cumulative_logprob=None)
    assert mine.logprobs is not None and len(mine.logprobs) == len(mine.token_ids)


@pytest.mark.parametrize("depth", [0, 1])
def test_deltas_join_to_the_whole(depth: int) -> None:
    outputs = play(4, random.Random(1), depth, stop=["END"], output_kind=RequestOutputKind.DELTA, logprobs=0)
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    entries = [entry for output in outputs for entry in output.outputs[0].logprobs or []]
    assert tokens == TOKENS[: len(tokens)]
    assert [next(iter(entry)) for entry in entries] == tokens
    assert "".join(output.outputs[0].text for output in outputs) == TEXT[: TEXT.index("END")]
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
