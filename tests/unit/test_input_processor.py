"""Input processing: prompts and parameters that are accepted, and those that are refused."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.input_processor import EngineRequest, InputProcessor
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.tokenizer.tokenizer import Tokenizer

VOCAB, MAX_LEN, EOS = 100, 32, 2
TOKENIZER = Tokenizer.from_path(embedded_model_path())


def processor_of(**changes: Any) -> InputProcessor:
    limits = {"vocab_size": VOCAB, "max_model_len": MAX_LEN, "max_logprobs": 5, "eos_token_ids": [EOS, 1_000_000]}
    return InputProcessor(**{**limits, "tokenizer": None, "seed": 0, "wall_clock": lambda: 123.0, **changes})


def with_text(**changes: Any) -> InputProcessor:
    return processor_of(tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size, **changes)


def process(prompt: Any, processor: InputProcessor | None = None, priority: int = 0, **params: Any) -> EngineRequest:
    return (processor or processor_of()).process("r", prompt, SamplingParams(**params), priority=priority)


def sequences(prompt: Any, processor: InputProcessor | None = None, **params: Any) -> list[Request]:
    """The requests that the scheduler gets."""
    processor = processor or processor_of()
    return processor.make_requests(process(prompt, processor, **params))


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        array("q", [5, 6, 7]),
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        iter([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint8),
        [np.int64(5), np.int32(6), 7],
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt_token_ids": np.array([5, 6, 7]), "cache_salt": None},
    ],
    ids=lambda prompt: repr(prompt).split(" at 0x")[0],
)
def test_token_ids(prompt: Any) -> None:
    processor = processor_of()
    request = process(prompt, processor)
    assert (request.prompt, request.prompt_token_ids) == (None, array("i", [5, 6, 7]))
    (sequence,) = processor.make_requests(request)
    assert (sequence.request_id, sequence.token_ids.tolist(), sequence.num_prompt_tokens) == ("r", [5, 6, 7], 3)
    assert (request.arrival_time, sequence.cache_salt, sequence.priority) == (123.0, None, 0)


@pytest.mark.parametrize(
    ("prompt", "truncate", "kept"),
    [
        ([1, 0, 1], None, [1, 0, 1]),  # not booleans
        (np.array([0, 1]), None, [0, 1]),
        (range(40), 1, [39]),
        (range(40), 4, [36, 37, 38, 39]),
        (range(40), -1, list(range(9, 40))),
        ([5, 6], 35, [5, 6]),
    ],
)
def test_tokens_that_are_kept(prompt: Any, truncate: int | None, kept: list[int]) -> None:
    request = process(prompt, truncate_prompt_tokens=truncate)
    assert (request.prompt_token_ids.tolist(), request.prompt_token_ids.itemsize) == (kept, 4)


def test_a_prompt_is_copied_once() -> None:
    prompt, processor = [5, 6], processor_of()
    request = process(prompt, processor, n=2)
    prompt.append(7)
    assert request.prompt_token_ids.tolist() == [5, 6]
    assert all(sequence.prompt_token_ids is request.prompt_token_ids for sequence in processor.make_requests(request))


@pytest.mark.parametrize("prompt", ["Once upon", {"prompt": "Once upon"}, {"prompt": "Once upon", "cache_salt": "s"}])
def test_text(prompt: Any) -> None:
    request = process(prompt, with_text())
    assert request.prompt == "Once upon"
    assert request.prompt_token_ids.tolist() == TOKENIZER.encode("Once upon")
    assert request.cache_salt == (prompt.get("cache_salt") if isinstance(prompt, dict) else None)


def test_token_ids_win_over_text() -> None:
    request = process({"prompt": "shown", "prompt_token_ids": [5]}, with_text())
    assert (request.prompt, request.prompt_token_ids.tolist()) == ("shown", [5])


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "the prompt has no tokens"),
        ({"prompt_token_ids": []}, ValueError, "the prompt has no tokens"),
        ({}, ValueError, "needs 'prompt' .*or 'prompt_token_ids'"),
        ({"prompt": None}, ValueError, "needs 'prompt'"),
        ({"prompt_ids": [5]}, ValueError, "no field 'prompt_ids'; it can have prompt, prompt_token_ids, cache_salt"),
        ({"prompt": b"a"}, TypeError, "prompt is b'a'; it must be a string"),
        ({"prompt_token_ids": "5 6"}, TypeError, "prompt_token_ids is '5 6'; it must be a list of ints"),
        ({"prompt_token_ids": [5], "cache_salt": 5}, ValueError, "cache_salt is 5"),
        ({"prompt": "a", "cache_salt": ""}, ValueError, "cache_salt is ''"),
        (5, TypeError, "prompt_token_ids is 5; it must be a list of ints"),
        (b"56", TypeError, "prompt_token_ids is b'56'"),
        ([5, "6"], TypeError, r"prompt_token_ids\[1\] is '6'; token ids are ints"),
        ([5, 6.0], TypeError, r"prompt_token_ids\[1\] is 6.0"),
        ([5, None], TypeError, r"prompt_token_ids\[1\] is None"),
        ([5, [6]], TypeError, r"prompt_token_ids\[1\] is \[6\]"),
        ([5, 2**63], TypeError, r"prompt_token_ids\[1\] is 9223372036854775808"),
        ([5, True], TypeError, r"prompt_token_ids\[1\] is True, a boolean; token ids are ints"),
        ({"prompt_token_ids": [False, 5]}, TypeError, r"prompt_token_ids\[0\] is False, a boolean"),
        ([True, "6"], TypeError, r"prompt_token_ids\[0\] is True"),
        (np.array([True, False]), TypeError, r"prompt_token_ids\[0\] is np.True_"),
        (torch.tensor([False, True]), TypeError, r"prompt_token_ids\[0\] is tensor\(False\), a boolean"),
        (iter([5, True]), TypeError, r"prompt_token_ids\[1\] is True, a boolean"),
        ([5, -1], ValueError, r"prompt_token_ids\[1\] is -1; the model's vocabulary has 100 tokens, 0 to 99"),
        ([5, 100], ValueError, r"prompt_token_ids\[1\] is 100; the model's vocabulary has 100 tokens, 0 to 99"),
        ([5] * 32, ValueError, "the prompt has 32 tokens; with max_model_len=32 it can have at most 31"),
        ("text", ValueError, "this engine has no tokenizer"),
    ],
    ids=lambda value: repr(value).split(" at 0x")[0][:40] if not isinstance(value, type) else "",
)
def test_prompts_that_are_refused(prompt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        process(prompt)


def test_texts_that_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt is an empty string"):
        process("", with_text())
    # a tokenizer can have more tokens than the model
    with pytest.raises(ValueError, match=r"prompt_token_ids\[\d+\] is \d+; the model's vocabulary has 100 tokens"):
        process("Once upon a time", processor_of(tokenizer=TOKENIZER))


# --- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "in_all"), [(3, 5, 8), (3, None, 32), (3, 1000, 32), (31, None, 32), (31, 16, 32)]
)
def test_max_tokens_end_at_the_models_length(prompt: int, max_tokens: int | None, in_all: int) -> None:
    (sequence,) = sequences([5] * prompt, max_tokens=max_tokens)
    assert sequence.max_total_tokens == in_all


def test_lengths_without_room() -> None:
    with pytest.raises(ValueError, match="the prompt has 35 tokens"):
        process(range(40), truncate_prompt_tokens=35)
    with pytest.raises(ValueError, match=r"min_tokens is 10, but a prompt of 25 tokens leaves room for 7 \("):
        process([5] * 25, min_tokens=10)
    (sequence,) = sequences([5] * 25, min_tokens=7)
    assert (sequence.params.min_tokens, sequence.max_tokens) == (7, 7)


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "stop_token_ids"),
    [
        ({}, {EOS}),  # an end token outside the vocabulary is never sampled
        ({"stop_token_ids": [9]}, {EOS, 9}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, {EOS}),
    ],
)
def test_what_ends_a_request(params: dict[str, Any], stop_token_ids: set[int]) -> None:
    assert sequences([5], **params)[0].stop_token_ids == stop_token_ids


def test_copies() -> None:
    copies = sequences([5], n=3, seed=1)
    assert [sequence.request_id for sequence in copies] == ["r\x1f0", "r\x1f1", "r\x1f2"]
    assert len({sequence.seed for sequence in copies}) == 3
    assert copies[0].seed == sequences([5], seed=1)[0].seed


def test_seeds() -> None:
    first, second = processor_of(), processor_of()

    def seeds(processor: InputProcessor, **params: Any) -> list[int]:
        return [sequences([5], processor, **params)[0].seed for _ in range(3)]

    unseeded = seeds(first)
    assert len(set(unseeded)) == 3
    assert seeds(second) == unseeded  # they depend on the engine's seed and the order only
    assert not set(seeds(first)) & set(unseeded)
    assert not set(seeds(processor_of(seed=1))) & set(unseeded)
    assert len(set(seeds(first, seed=9))) == 1
    assert seeds(first, seed=9) == seeds(processor_of(seed=5), seed=9)
    assert all(0 <= seed < 2**64 for seed in unseeded)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ["a"]}, "stop=.*needs a tokenizer"),
        ({"logprobs": 6}, "logprobs must be at most 5, got 6"),
        ({"logit_bias": {100: 1}}, r"logit_bias names tokens \[100\]"),
    ],
    ids=str,
)
def test_parameters_that_do_not_suit_the_model(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        process([5], **params)


def test_parameters_are_checked_once_more_and_kept_apart() -> None:
    params = SamplingParams(stop_token_ids=[9])
    processor = processor_of()
    request = processor.process("r", [5], params)
    assert params.stop_token_ids is not None
    params.stop_token_ids.append(10)
    params.temperature = -1.0
    assert (request.params.stop_token_ids, request.params.temperature) == ([9], 1.0)
    assert processor.make_requests(request)[0].params is request.params
    with pytest.raises(ValueError, match=r"temperature must be 0 .*got -1.0"):
        processor_of().process("r", [5], params)


def test_parameters_that_requests_share_are_checked_once() -> None:
    processor = processor_of()
    params = SamplingParams(stop_token_ids=[9])
    checked = processor.check_params(params)
    params.temperature = -1.0
    first, second = (processor.process(name, [5], checked, params_checked=True) for name in ("a", "b"))
    assert first.params is second.params is checked
    (one,), (other,) = map(processor.make_requests, (first, second))
    assert (first.params.temperature, one.stop_token_ids) == (1.0, {EOS, 9})
    assert one.seed != other.seed


@pytest.mark.parametrize(("wanted", "kept"), [(-1, -1), (0, 0), (VOCAB - 1, VOCAB - 1), (VOCAB, VOCAB), (2**70, VOCAB)])
def test_top_k_is_at_most_the_vocabulary(wanted: int, kept: int) -> None:
    assert process([5], top_k=wanted).params.top_k == kept


@pytest.mark.parametrize("wrong", [None, {}, "params", SamplingParams])
def test_parameters_of_another_type(wrong: Any) -> None:
    with pytest.raises(TypeError, match="it must be a SamplingParams"):
        processor_of().process("r", [5], wrong)


@pytest.mark.parametrize("wrong", [1.5, "1", None, True])
def test_priorities_are_ints(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"priority is .*; it must be an int"):
        process([5], priority=wrong)


def test_bad_words_in_both_spellings_are_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, words, encode = with_text(), [], TOKENIZER.encode

    def record(text: str, **options: Any) -> list[int]:
        words.append(text)
        return encode(text, **options)

    monkeypatch.setattr(TOKENIZER, "encode", record)
    checked = processor.check_params(SamplingParams(bad_words=["fox"]))
    first, second = (processor.process(name, [5], checked, params_checked=True) for name in ("a", "b"))
    assert words == ["fox", " fox"]
    (sequence,) = processor.make_requests(first)
    assert sequence.bad_words_token_ids == [encode(word, add_special_tokens=False) for word in words]
    assert first.bad_words_token_ids == second.bad_words_token_ids
