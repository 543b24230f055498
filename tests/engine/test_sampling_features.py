"""Every sampling parameter through the whole engine, on a tiny model with logits that `transformers` confirms."""

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import reference_logits
from tests.helpers.engines import EOS, TEXT_MODEL, drain, make_engine, prompt_of

from fleetfoot import LLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.records.sampling_params import bad_words_token_ids

VOCAB = TEXT_MODEL["vocab_size"]
MAX_LEN = TEXT_MODEL["max_position_embeddings"]
PROMPT = prompt_of(9, VOCAB, seed=1)
PROMPTS = [prompt_of(length, VOCAB, seed=length) for length in (3, 50, 17, 1, 33, 24)]

Start = Callable[..., LLM]


@pytest.fixture(scope="module")
def start(text_model: Path) -> Iterator[Start]:
    """Starts engines on the text model; the same settings give the same engine, and all end with the module."""
    started: dict[tuple[tuple[str, Any], ...], LLM] = {}

    def get(**keywords: Any) -> LLM:
        key = tuple(sorted(keywords.items()))
        if key not in started:
            started[key] = LLM(str(text_model), device="cpu", **{"max_num_seqs": 8, **keywords})
        return started[key]

    yield get
    for llm in started.values():
        llm.shutdown()


@pytest.fixture(scope="module")
def llm(start: Start) -> LLM:
    return start()


@pytest.fixture(scope="module")
def reference(text_checkpoint: tuple[Path, Any]) -> Any:
    return text_checkpoint[1]


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.check_integrity()
    return outputs


def one(llm: LLM, prompt: list[int] = PROMPT, **params: Any) -> CompletionOutput:
    """A completion, greedy by default."""
    (output,) = run(llm, prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, **params}))
    (completion,) = output.outputs
    return completion


def contains(tokens: list[int], sequence: list[int]) -> bool:
    return any(tokens[i : i + len(sequence)] == sequence for i in range(len(tokens)))


def _greedy_reference(reference: Any, params: SamplingParams) -> list[int]:
    """Greedy tokens from the reference's logits, processed as the parameters' documentation describes."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + (params.max_tokens or 0):
        logits, output = reference_logits(reference, tokens)[-1].clone(), tokens[len(PROMPT) :]  # [vocab]
        if params.allowed_token_ids is not None:
            logits[torch.isin(torch.arange(VOCAB), torch.tensor(params.allowed_token_ids), invert=True)] = -torch.inf
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        for token in set(tokens):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(output):
            logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    "processors",
    [
        {},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"logit_bias": {7: 4.0, 8: 4.5, 9: -100.0}},
        {"allowed_token_ids": [11, 500, 501, 502, 1999]},
        {"allowed_token_ids": list(range(300, 400)), "logit_bias": {310: 2.0}, "presence_penalty": 1.5},
    ],
    ids=str,
)
def test_logits_processors(processors: dict[str, Any], llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **processors)
    (output,) = run(llm, PROMPT, params)
    assert output.outputs[0].token_ids == _greedy_reference(reference, params)


def test_a_bad_word_of_several_tokens(llm: LLM) -> None:
    """Its first tokens are allowed; the last one must not follow them, but is allowed elsewhere."""
    encode = functools.partial(llm.get_tokenizer().encode, add_special_tokens=False)
    (sequence, *_) = bad_words_token_ids(["QXZ"], encode)
    assert len(sequence) > 1
    # only the word's own tokens are allowed: eventually the model would spell it
    params: dict[str, Any] = {"allowed_token_ids": sequence, "temperature": 100.0, "max_tokens": 100}
    for seed in range(3):
        assert contains(one(llm, seed=seed, **params).token_ids, sequence)
        tokens = one(llm, seed=seed, bad_words=["QXZ"], **params).token_ids
        assert not contains(tokens, sequence)
        assert set(tokens) == set(sequence)


@pytest.mark.parametrize(
    ("params", "count", "text", "reasons"),
    [
        ({}, 1, "", ("stop", None)),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, 1, "<|end|>", ("stop", None)),
        ({"ignore_eos": True}, 4, "", ("length", None)),
        ({"ignore_eos": True, "skip_special_tokens": False}, 4, "<|end|>" * 4, ("length", None)),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, 1, "", ("stop", EOS)),  # the request's own stop token
    ],
)
def test_the_end_token(params: dict[str, Any], count: int, text: str, reasons: tuple[Any, Any], llm: LLM) -> None:
    found = one(llm, logit_bias={EOS: 1e9}, max_tokens=4, **params)
    assert (found.token_ids, found.text) == ([EOS] * count, text)
    assert (found.finish_reason, found.stop_reason) == reasons


def test_truncated_prompts(llm: LLM) -> None:
    long = prompt_of(MAX_LEN + 50, VOCAB, seed=2)
    for requested, kept in ((1, 1), (-1, MAX_LEN - 3)):
        (output,) = run(llm, long, SamplingParams(temperature=0, max_tokens=3, truncate_prompt_tokens=requested))
        assert output.prompt_token_ids == long[-kept:]
        assert output.outputs[0].token_ids == one(llm, long[-kept:], max_tokens=3).token_ids
    (output,) = run(llm, "Once upon a time there was a fox", SamplingParams(truncate_prompt_tokens=2))
    assert output.prompt == "Once upon a time there was a fox"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)[-2:]


def _check_entry(entry: dict[int, Any], sampled: int, requested: int, expected: torch.Tensor, llm: LLM) -> None:
    """One position's logprobs against log-probabilities ``expected [vocab]``."""
    order = expected.argsort(descending=True).tolist()
    ids = list(entry)
    assert ids[0] == sampled
    assert ids[1:] == [token for token in order[:requested] if token != sampled]
    for token, logprob in entry.items():
        assert logprob.logprob == pytest.approx(expected[token].item(), abs=1e-4)
        assert logprob.rank == order.index(token) + 1
        assert logprob.decoded_token == llm.get_tokenizer().decode_token(token)


@pytest.mark.parametrize("requested", [0, 1, 5, 20])
def test_logprobs(requested: int, llm: LLM, reference: Any) -> None:
    """They are the model's own: neither bias nor temperature shows in them."""
    found = one(llm, logprobs=requested, temperature=2.0, seed=4, logit_bias={7: 3.0}, top_k=50)
    expected = reference_logits(reference, PROMPT + found.token_ids).log_softmax(-1)[len(PROMPT) - 1 :]
    assert found.logprobs is not None
    pairs = list(zip(found.token_ids, found.logprobs, strict=True))
    for position, (token, entry) in enumerate(pairs):
        _check_entry(entry, token, requested, expected[position], llm)
    assert found.cumulative_logprob == pytest.approx(sum(entry[token].logprob for token, entry in pairs))


def test_logprobs_of_the_whole_vocabulary(start: Start) -> None:
    for entry in one(start(max_logprobs=-1), logprobs=-1, max_tokens=2).logprobs or [{}]:
        assert len(entry) == VOCAB
        assert sum(torch.tensor([logprob.logprob for logprob in entry.values()]).exp()) == pytest.approx(1.0, abs=1e-3)


SETTINGS = [{}, {"max_num_batched_tokens": 8}, {"max_num_batched_tokens": 13}, {"enable_prefix_caching": False}]


@pytest.mark.parametrize("keywords", SETTINGS, ids=str)
def test_prompt_logprobs(keywords: dict[str, Any], start: Start, reference: Any) -> None:
    """Also of requests with several copies."""
    llm = start(**keywords)
    params = [
        SamplingParams(n=n, seed=0, max_tokens=2, prompt_logprobs=number % 4)
        for number, n in enumerate((1, 3, 1, 3, 2, 1))
    ]
    for _ in range(2):  # the second time, the prompts are in the prefix cache, which has no logits
        for output, requested in zip(run(llm, PROMPTS, params), params, strict=True):
            prompt, found = output.prompt_token_ids, output.prompt_logprobs
            assert found is not None and len(found) == len(prompt)
            assert found[0] is None
            expected = reference_logits(reference, prompt).log_softmax(-1)
            for position, entry in enumerate(found[1:], start=1):
                assert entry is not None
                _check_entry(entry, prompt[position], requested.prompt_logprobs or 0, expected[position - 1], llm)


def test_output_kinds_agree(text_model: Path) -> None:
    common: dict[str, Any] = {"max_tokens": 25, "seed": 1, "n": 2, "logprobs": 1, "stop": ["zzz", "a"]}
    engine = make_engine(text_model)
    for kind in RequestOutputKind:
        engine.add_request(kind.name, PROMPT, SamplingParams(output_kind=kind, **common))
    outputs: dict[str, list[RequestOutput]] = {kind.name: [] for kind in RequestOutputKind}
    for output in drain(engine):
        outputs[output.request_id].append(output)
    engine.shutdown()

    (final,) = outputs["FINAL_ONLY"]
    for index, whole in enumerate(final.outputs):
        cumulative, deltas = ([output.outputs[index] for output in outputs[kind]] for kind in ("CUMULATIVE", "DELTA"))
        for earlier, later in itertools.pairwise(cumulative):
            assert later.text.startswith(earlier.text)
            assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert cumulative[-1] == whole
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert [entry for delta in deltas for entry in delta.logprobs or []] == whole.logprobs
        ends = [(one.finish_reason, one.stop_reason, one.cumulative_logprob) for one in (deltas[-1], whole)]
        assert ends[0] == ends[1]
    for outputs_of_kind in outputs.values():
        *others, last = outputs_of_kind
        assert last.finished and not any(output.finished for output in others)
