"""The end of a request: stop strings are never in the text, not even in part, however tokens and steps cut it.

Steps with several tokens give the output of steps with one token, also where a request ends in the middle of a step.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.engines import ScriptedExecutor, drain, scripted_engine

from fleetfoot import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
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
