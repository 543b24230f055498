"""Sampling with drafts keeps the target's distribution: the first tokens of thousands of requests, counted, against
their exact probabilities. An error with drafts shows in tokens that follow each other, so triples are counted."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint, make_reference, reference_logits
from tests.helpers.engines import make_engine

from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import ModelRunnerOutput
from fleetfoot.sampling import sampler_v1, verification
from fleetfoot.scheduler.stats import DraftStats

VOCAB = 6
MODEL: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 32}
PROMPT = [3, 1, 4, 1, 5, 2, 3, 1]
NUM_REQUESTS = 2000
NUM_DRAFTS = 3
LEAST_EXPECTED = 5.0
"""Cells that expect fewer are merged: the statistic is chi-squared only where counts are not too small."""
SUSPICIOUS = 1e-3
"""A smaller p-value fails. Seeds are fixed, so a test that passes goes on to pass."""

Triple = tuple[int, ...]
Probabilities = dict[Triple, float]
LogitsOf = Callable[[list[int]], torch.Tensor]


def triple_probabilities(logits_of: LogitsOf, temperature: float, top_k: int) -> Probabilities:
    """Of every triple of tokens behind the prompt, exactly; ``logits_of``: those ``[VOCAB]`` of the next token."""
    found: Probabilities = {(): 1.0}
    for _ in range(3):
        longer: Probabilities = {}
        for tokens, probability in found.items():
            logits = logits_of([*PROMPT, *tokens]).double() / temperature
            kept = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
            for token, share in enumerate(kept.softmax(0).tolist()):
                longer[(*tokens, token)] = probability * share
        found = longer
    return found


def p_value(triples: Sequence[Triple], probabilities: Probabilities) -> float:
    """Pearson's chi-squared test: the probability of counts at least as far from the expected ones."""
    counts, total = Counter(triples), len(triples)
    if any(not probabilities[triple] for triple in counts):
        return 0.0
    observed, expected = [0.0], [0.0]
    for triple in sorted(probabilities, key=probabilities.__getitem__):
        if expected[-1] >= LEAST_EXPECTED:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += counts[triple]
        expected[-1] += probabilities[triple] * total
    statistic = sum((one - other) ** 2 / other for one, other in zip(observed, expected, strict=True))
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def test_the_test_itself() -> None:
    uniform = dict.fromkeys(itertools.product(range(VOCAB), repeat=3), 1 / VOCAB**3)
    even = [triple for triple in uniform for _ in range(10)]
    assert p_value(even, uniform) == pytest.approx(1.0)
    assert p_value(even + [(0, 0, 0)] * 12, uniform) > SUSPICIOUS
    assert p_value(even + [(0, 0, 0)] * 70, uniform) < SUSPICIOUS
    certain = {(0, 0, 0): 0.5, (0, 0, 1): 0.5, (0, 0, 2): 0.0}
    assert p_value([(0, 0, 0), (0, 0, 1)] * 20, certain) == pytest.approx(1.0)
    assert p_value([(0, 0, 0)] * 14 + [(0, 0, 1)] * 26, certain) == pytest.approx(0.0578, abs=1e-3)  # from a table
    assert p_value([(0, 0, 0), (0, 0, 1)] * 20 + [(0, 0, 2)], certain) == 0.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folders and reference models of the target, of one much like it, and of one that is not."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("close", "target", "different")}
    close = make_reference("llama", seed=1, **MODEL)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in close.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    close.save_pretrained(folders["close"])
    others = (make_checkpoint(folders[name], "llama", seed=n, **MODEL) for name, n in (("target", 1), ("different", 7)))
    return {name: made for name, *made in zip(folders, folders.values(), (close, *others), strict=True)}


def probabilities_of(reference: Any, temperature: float = 1.0, top_k: int = VOCAB) -> Probabilities:
    return triple_probabilities(lambda tokens: reference_logits(reference, tokens)[-1], temperature, top_k)


def sample(folder: Path, runner: str, config: dict[str, Any] | None, **params: Any) -> tuple[list[Triple], DraftStats]:
    """The first three tokens of each of NUM_REQUESTS requests of different seeds, and the counters of drafts."""
    speculative = config and {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False, **config}
    limits = {"max_num_seqs": 512, "max_num_batched_tokens": 4096, "block_size": 16, "num_gpu_blocks_override": 1100}
    settings = {"runner": runner, "dtype": "float32", "skip_tokenizer_init": True, "speculative_config": speculative}
    engine = make_engine(folder, **settings, **limits)
    for seed in range(NUM_REQUESTS):
        of_request = SamplingParams(**{"temperature": 1.0, "max_tokens": 4, "ignore_eos": True, "seed": seed, **params})
        engine.add_request(str(seed), PROMPT, of_request)
    triples = []
    while engine.has_unfinished_requests():
        triples += [tuple(output.outputs[0].token_ids[:3]) for output in engine.step() if output.finished]
    drafts = engine.stats().drafts
    engine.shutdown()
    assert len(triples) == NUM_REQUESTS
    return triples, drafts


def drafts_of(models: dict[str, Any], drafter: str) -> dict[str, Any]:
    return {"method": "ngram"} if drafter == "ngram" else {"model": str(models[drafter][0])}


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("drafter", "features"),
    [("close", {}), ("different", {}), ("ngram", {}), ("close", {"temperature": 1.5, "top_k": 4})],
)
def test_drafts_keep_distributions(models: dict[str, Any], drafter: str, features: dict[str, Any], runner: str) -> None:
    folder, reference = models["target"]
    triples, drafts = sample(folder, runner, drafts_of(models, drafter), **features)
    assert p_value(triples, probabilities_of(reference, **features)) > SUSPICIOUS
    assert drafts.num_rows >= NUM_REQUESTS  # n-grams too: nearly every token of the vocabulary is in the prompt
    assert 0.02 < drafts.acceptance_rate < 0.98


@pytest.mark.parametrize("drafter", ["close", "different"])
def test_the_drafters_own_samples_are_caught(models: dict[str, Any], drafter: str) -> None:
    folder, reference = models[drafter]
    triples, _ = sample(folder, "v2", None)
    assert p_value(triples, probabilities_of(reference)) > SUSPICIOUS
    assert p_value(triples, probabilities_of(models["target"][1])) < 1e-12


def test_a_rule_that_accepts_too_much_is_caught(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft is accepted even if the target has chosen another token."""

    def too_much(sampled: list[int], invalid: list[bool], drafts: list[list[int]], *others: Any) -> ModelRunnerOutput:
        width = 1 + len(drafts[0]) if drafts else 1
        accepted = [[sampled[index * width], *proposed[1:]] for index, proposed in enumerate(drafts)]
        return verification.verify_drafts(sampled, invalid, accepted, *others)

    monkeypatch.setattr(sampler_v1, "verify_drafts", too_much)
    folder, reference = models["target"]
    triples, _ = sample(folder, "v1", drafts_of(models, "close"))
    assert p_value(triples, probabilities_of(reference)) < 1e-6


@pytest.mark.parametrize("drafter", ["close", "different"])
def test_as_much_is_accepted_as_the_shared_noise_promises(models: dict[str, Any], drafter: str) -> None:
    """The first draft is right with a probability of at least (1 - d) / (1 + d), d being the total variation distance;
    no rule accepts more than 1 - d."""
    folder, reference = models["target"]
    least = most = 0.0
    for first, share in enumerate(reference_logits(reference, PROMPT)[-1].softmax(0).tolist()):
        both = [reference_logits(model, [*PROMPT, first])[-1].softmax(0) for model in (reference, models[drafter][1])]
        distance = (both[0] - both[1]).abs().sum().item() / 2
        least += share * (1 - distance) / (1 + distance)
        most += share * (1 - distance)
    # A request has three tokens: one of the prompt's step, then the draft and one more, or two steps with no room.
    config = {**drafts_of(models, drafter), "num_speculative_tokens": 1}
    _, drafts = sample(folder, "v2", config, max_tokens=3)
    deviation = 4 * 0.5 / NUM_REQUESTS**0.5
    assert least - deviation < drafts.num_accepted / NUM_REQUESTS < most + deviation
    assert most - least > deviation or drafter == "close"
