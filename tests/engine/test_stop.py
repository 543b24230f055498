"""Stop strings through the engine: never in the text, not even in part, however tokens and steps cut it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.engines import EOS, ScriptedExecutor, drain, make_engine, prompt_of, scripted_engine

from fleetfoot import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(embedded_model_path())
TEXT = "The fox said: STOP it now! Grüße, 你好 😀. STOPPED, and the END of it."
TOKENS = TOKENIZER.encode(TEXT, add_special_tokens=False)


def stream(engine: LLMEngine, params: SamplingParams, request_id: str = "r") -> list[RequestOutput]:
    engine.add_request(request_id, [5, 6], params)
    outputs = drain(engine)
    assert engine.core.scheduler.pool.num_free == engine.core.scheduler.config.num_blocks
    return outputs


def play(tokens: list[int], **params: Any) -> list[RequestOutput]:
    """The deltas of a request for which the model samples ``tokens``."""
    engine = scripted_engine(ScriptedExecutor({"r": tokens}), tokenizer=TOKENIZER)
    return stream(
        engine, SamplingParams(max_tokens=len(tokens), output_kind=RequestOutputKind.DELTA, ignore_eos=True, **params)
    )


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.outputs[0].token_ids]


def test_the_script_alone() -> None:
    outputs = play(TOKENS)
    assert text_of(outputs) == TEXT
    assert tokens_of(outputs) == TOKENS
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("length", None)
    assert "\ufffd" not in "".join(output.outputs[0].text for output in outputs)


@pytest.mark.parametrize(
    ("stop", "hit"),
    [
        (["STOP"], "STOP"),
        (["STOPPED"], "STOPPED"),  # the first STOP begins it, and is no match
        (["PPED, a", "zebra"], "PPED, a"),  # from the middle of a token to the middle of another
        (["好 😀"], "好 😀"),  # characters that are several tokens each
        (["it.", "END", "nothing"], "END"),
        ([" it now", "STOP it"], "STOP it"),  # the one that ends first
        (["T"], "T"),
        (["T", "The fox"], "T"),
        ([TEXT], TEXT),
        (["."], "."),
    ],
    ids=str,
)
@pytest.mark.parametrize("include", [False, True], ids=["cut", "kept"])
def test_stop_strings(stop: list[str], hit: str, include: bool) -> None:
    outputs = play(TOKENS, stop=stop, include_stop_str_in_output=include)
    end = TEXT.index(hit) + len(hit)
    expected = TEXT[:end] if include else TEXT[: end - len(hit)]
    assert text_of(outputs) == expected
    shown = ""
    for output in outputs:
        shown += output.outputs[0].text
        assert expected.startswith(shown)  # nothing was shown that had to be taken back
    last = outputs[-1]
    assert last.finished
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", hit)
    # the tokens are those up to the one that completed the stop string, whole
    tokens = tokens_of(outputs)
    assert tokens == TOKENS[: len(tokens)]
    assert TOKENIZER.decode(tokens).startswith(TEXT[:end])
    assert not TOKENIZER.decode(tokens[:-1]).startswith(TEXT[:end])


def test_what_was_held_back_for_a_stop_string_that_never_came_is_released() -> None:
    cut = TOKENIZER.encode("all is well, ST", add_special_tokens=False)
    outputs = play(cut, stop=["STOP"])
    assert text_of(outputs) == "all is well, ST"
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert "S" not in text_of(outputs[:-1])


def test_what_was_held_back_is_released_by_the_end_token() -> None:
    cut = TOKENIZER.encode("all is well, ST", add_special_tokens=False)
    engine = scripted_engine(ScriptedExecutor({"r": [*cut, EOS]}), tokenizer=TOKENIZER)
    outputs = stream(engine, SamplingParams(max_tokens=100, stop=["STOP"]))
    assert outputs[-1].outputs[0].text == "all is well, ST"
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", None)
    assert outputs[-1].outputs[0].token_ids == [*cut, EOS]


def test_what_was_held_back_is_released_by_an_abort() -> None:
    cut = TOKENIZER.encode("all is well, STOP", add_special_tokens=False)
    engine = scripted_engine(ScriptedExecutor({"r": cut}), tokenizer=TOKENIZER)
    engine.add_request("r", [5], SamplingParams(max_tokens=100, stop=["STOP"]))
    for _ in cut[:-1]:
        (output,) = engine.step()
    held = TOKENIZER.decode(cut[:-1])
    assert held.startswith("all is well, S") and output.outputs[0].text == "all is well, "
    engine.abort_request("r")
    (output,) = engine.step()
    assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].text) == (True, "abort", held)
    engine.check_integrity()


def test_an_unfinished_character_is_never_shown_before_the_end() -> None:
    smile = TOKENIZER.encode("hi 😀", add_special_tokens=False)
    assert len(TOKENIZER.encode("😀", add_special_tokens=False)) > 1
    outputs = play(smile[:-1])
    assert "\ufffd" not in text_of(outputs[:-1])
    assert text_of(outputs) == "hi \ufffd"


def test_stop_strings_wait_for_min_tokens() -> None:
    count = len(TOKENIZER.encode(TEXT[: TEXT.index("STOP") + 4], add_special_tokens=False))
    assert text_of(play(TOKENS, stop=["STOP"], min_tokens=count - 1)) == TEXT[: TEXT.index("STOP")]
    later = play(TOKENS, stop=["STOP"], min_tokens=count + 3)
    assert text_of(later) == TEXT[: TEXT.rindex("STOP")]
    assert len(tokens_of(later)) > count + 3


def test_a_stop_string_in_the_last_token_allowed() -> None:
    tokens = TOKENIZER.encode("go on STOP", add_special_tokens=False)
    outputs = play(tokens, stop=["STOP"])
    assert text_of(outputs) == "go on "
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", "STOP")


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    engine = scripted_engine(ScriptedExecutor({"r": TOKENS}), tokenizer=TOKENIZER)
    engine.add_request("r", "STOP STOP ST", SamplingParams(max_tokens=4, stop=["STOP"]))
    outputs = drain(engine)
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].outputs[0].text == TOKENIZER.decode(TOKENS[:4])


def test_copies_stop_each_by_itself() -> None:
    script = {"r\x1f0": TOKENS, "r\x1f1": TOKENS[::-1], "r\x1f2": TOKENS[5:]}
    engine = scripted_engine(ScriptedExecutor(script), tokenizer=TOKENIZER)
    params = SamplingParams(n=3, max_tokens=len(TOKENS) - 5, stop=["STOPPED"], output_kind=RequestOutputKind.CUMULATIVE)
    outputs = stream(engine, params)
    last = outputs[-1]
    assert [completion.finish_reason for completion in last.outputs] == ["stop", "length", "stop"]
    assert last.outputs[0].text == TEXT[: TEXT.index("STOPPED")]
    assert last.outputs[2].text == last.outputs[0].text.removeprefix(TOKENIZER.decode(TOKENS[:5]))
    assert last.outputs[1].token_ids == script["r\x1f1"][: len(TOKENS) - 5]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@settings(max_examples=150, deadline=None)
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
    if "\ufffd" not in hit:  # at the end, what is no character becomes one, and stops nothing any more
        assert text_of(outputs) == text[: ends[0] - len(hit)]
        assert outputs[-1].outputs[0].stop_reason == hit


def test_the_real_model_stops_where_its_text_says(text_model: Path) -> None:
    """The same with real sampling: the stop strings are parts of the request's text without them."""
    engine = make_engine(text_model)
    params: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
    for seed in range(6):
        prompt = prompt_of(4 + seed, 2048, seed=seed)
        engine.add_request("free", prompt, SamplingParams(seed=seed, **params))
        text = text_of(drain(engine))
        stop = [text[len(text) // 3 :][:5], text[len(text) // 2 :][:3]]
        end = min(text.index(s) + len(s) for s in stop)
        hit = max((s for s in stop if text[:end].endswith(s)), key=len)
        engine.add_request("stopped", prompt, SamplingParams(seed=seed, stop=stop, **params))
        engine.add_request(
            "kept", prompt, SamplingParams(seed=seed, stop=stop, include_stop_str_in_output=True, **params)
        )
        outputs = drain(engine)
        for name, expected in (("stopped", text[: end - len(hit)]), ("kept", text[:end])):
            mine = [output for output in outputs if output.request_id == name]
            assert text_of(mine) == expected
            assert mine[-1].outputs[0].stop_reason == hit
    engine.shutdown()
