"""Sampling with drafts keeps the target's distribution: the first tokens of thousands of requests, counted, against
their exact probabilities. An error with drafts shows in tokens that follow each other, so triples are counted.

Draft verification in Model Runner V1, against the operation of V2; and the tokens that need logits.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint, make_reference, reference_logits
from tests.helpers.engines import make_engine

from fleetfoot.kernels.prepare.reference import accept_drafts_torch
from fleetfoot.kernels.prepare.tables import RowTables
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import NewRequest, RowLogprobs, SchedulerOutput
from fleetfoot.runner.v1.host_state import HostState, StepInputs, logits_indices, prepare_inputs
from fleetfoot.sampling.verification import verify_drafts
from fleetfoot.scheduler.stats import DraftStats

VOCAB = 6
MODEL: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 1, "max_position_embeddings": 32}
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
    settings = {
        "model_runner": runner,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "speculative_config": speculative,
    }
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


@pytest.mark.parametrize(
    ("runner", "drafter", "features"),
    [
        ("v2", "close", {}),
        ("v1", "different", {}),
        ("v1", "ngram", {}),
        ("v2", "close", {"temperature": 1.5, "top_k": 4}),
    ],
)
def test_drafts_keep_distributions(models: dict[str, Any], runner: str, drafter: str, features: dict[str, Any]) -> None:
    folder, reference = models["target"]
    triples, drafts = sample(folder, runner, drafts_of(models, drafter), **features)
    assert p_value(triples, probabilities_of(reference, **features)) > SUSPICIOUS
    assert drafts.num_rows >= NUM_REQUESTS  # n-grams too: nearly every token of the vocabulary is in the prompt
    assert 0.02 < drafts.acceptance_rate < 0.98


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


NUM_ROWS = 6
K = 3


def make_step(rng: random.Random, num_decodes: int, num_ending: int) -> tuple[HostState, SchedulerOutput, StepInputs]:
    """Decodes that verify drafts, prefills that end, and one that goes on; drafts are of three tokens and none."""
    host = HostState(NUM_ROWS, max_model_len=40, block_size=4, num_drafts=K)
    rows = rng.sample(range(NUM_ROWS), num_decodes + num_ending + 1)
    requests = []
    for index, row in enumerate(rows):
        is_decode, length = index < num_decodes, rng.randint(5, 30)
        tokens, blocks = array("i", [rng.randint(1, 3) for _ in range(length)]), list(range(row * 11, row * 11 + 11))
        most = length + (rng.randint(0, 5) if is_decode else 9)
        of_request = (str(row), row, tokens, 2, length - 1 if is_decode else 0, blocks, SamplingParams(), 0)
        requests.append(NewRequest(*of_request, frozenset(), [], max_total_tokens=most))
    counts = [1 + K] * num_decodes + [len(request.token_ids) for request in requests[num_decodes:]]
    counts[-1] -= 2
    num_drafts = K if num_decodes else 0
    sizes = (num_decodes, num_decodes + num_ending, sum(counts))
    output = SchedulerOutput(0, rows, counts, *sizes, new_requests=requests, num_drafts=num_drafts)
    host.update(output)
    for row in rows[:num_decodes]:
        host.drafts[row] = [rng.choice((-1, 1, 2, 3)) for _ in range(K)]
    return host, output, prepare_inputs(host, output, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(40))
def test_drafts_are_accepted_as_on_the_device(seed: int) -> None:
    rng = random.Random(seed)
    num_decodes, num_ending = rng.randint(1, 3), rng.randint(0, 2)
    host, output, inputs = make_step(rng, num_decodes, num_ending)
    indices = logits_indices(inputs, output)
    num_logits = num_decodes * (1 + K) + num_ending
    assert len(indices) == num_logits
    # every token of a decode, and the last of a prefill that ends
    places = [(int(inputs.token_rows[t]), int(inputs.positions[t])) for t in indices]
    expected = [(row, int(host.num_computed[row]) + j) for row in output.rows[:num_decodes] for j in range(4)]
    expected += [(row, int(host.num_tokens[row]) - 1) for row in output.rows[num_decodes : num_decodes + num_ending]]
    assert places == expected

    chosen = [rng.randint(1, 3) for _ in range(num_logits)]
    flags = [rng.random() < 0.1 for _ in range(num_logits)]
    rows = output.rows[: num_decodes + num_ending]
    room = (host.limits[rows] + 1 - host.num_tokens[rows]).tolist()
    errors = ["invalid" * flag for flag in flags]
    new = verify_drafts(chosen, errors, host.drafts[rows[:num_decodes]].tolist(), room, {})

    verified, width = num_decodes * (1 + K), 1 + K
    unused = torch.zeros(0, dtype=torch.int32)
    num_computed, limits, draft_tokens = map(torch.from_numpy, (host.num_computed, host.limits, host.drafts))
    tables = RowTables(num_computed, unused, limits, unused, draft_tokens, unused, unused, host.block_size)
    counts = torch.zeros((3, num_decodes), dtype=torch.int32)
    decodes, *of_decodes = (torch.tensor(values) for values in (output.rows[:num_decodes], chosen, flags))
    accept_drafts_torch(decodes, *(t[:verified].view(num_decodes, width) for t in of_decodes), tables, counts)
    taken, rejected, drafted = counts
    assert [len(tokens) for tokens in new.sampled_token_ids] == taken.tolist() + [1] * num_ending
    assert [width - len(tokens) for tokens in new.sampled_token_ids[:num_decodes]] == rejected.tolist()
    assert new.num_drafted == drafted.tolist()
    starts = [width * index for index in range(num_decodes)] + [verified + index for index in range(num_ending)]
    for index, (tokens, begin) in enumerate(zip(new.sampled_token_ids, starts, strict=True)):
        assert tokens == chosen[begin : begin + len(tokens)]
        assert (index in new.invalid) == (bool(tokens) and flags[begin + len(tokens) - 1])


def test_a_query_beyond_the_end_has_no_slots() -> None:
    host, output, inputs = make_step(random.Random(3), 2, 1)
    slots = inputs.metadata.slot_mapping.numpy()
    is_dead = inputs.positions >= host.limits[inputs.token_rows]
    assert is_dead.any() and not is_dead.all()
    last = (host.limits[inputs.token_rows] - 1) // 4  # the block of the last input, which drafts after it may be in
    is_outside = inputs.positions // 4 > last
    assert (slots[is_outside] == -1).all() and (slots[~is_outside] >= 0).all()
    rows, positions = inputs.token_rows[~is_dead], inputs.positions[~is_dead]
    np.testing.assert_array_equal(slots[~is_dead], host.block_table[rows, positions // 4] * 4 + positions % 4)
    assert inputs.metadata.num_decodes == 0  # of one token each
    drafts = [max(int(draft), 0) for row in output.rows[:2] for draft in host.drafts[row]]
    ids = inputs.input_ids.tolist()
    assert [*ids[1:4], *ids[5:8]] == drafts


def test_logprobs_are_those_of_the_accepted_tokens() -> None:
    rows = [RowLogprobs([token], [-0.5], 1).pack() for token in range(9)]
    logprobs = dict(enumerate(rows[:4])) | {8: rows[8]}
    for room, expected in ((9, {0: rows[:2], 2: [rows[8]]}), (0, {2: [rows[8]]})):
        new = verify_drafts(list(range(9)), [""] * 9, [[0, 7, 7], [7, 7, 7]], [room, 9, 9], logprobs)
        assert new.sampled_token_ids == [[0, 1] if room else [], [4], [8]]
        assert new.logprobs == expected
