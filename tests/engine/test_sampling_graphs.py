"""Every sampling parameter in steps that are graphs: tokens and logprobs equal those of eager steps and of Model Runner
V1, in any batch, without host synchronisation."""

import weakref
from functools import partial
from typing import Any

import pytest
from tests.helpers import runner_lives
from tests.helpers.kernels import cpu_kernels
from tests.helpers.recording_device import RecordingDevice, StrictDevice, unwatched
from tests.helpers.runner_lives import assert_same, in_one_runner, live, make_runner

from fleetfoot.kernels.sampling.token_logprobs import MAX_SELECTED
from fleetfoot.native.loading import native_problem
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.sampling.shape import EVERYTHING, GRAPH_LOGPROBS, LIST_CAPACITY, SamplingVariant
from fleetfoot.speculative.drafter import NO_DRAFTING, DraftSettings

pytestmark = pytest.mark.skipif(
    bool(native_problem()), reason="torch's attention rounds otherwise in other batches, and here bits count"
)
VOCAB = 2048
PROCESSORS = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5, "temperature": 0.0},
    "frequency": {"frequency_penalty": 0.8},
    "rewarded": {"repetition_penalty": 0.7, "frequency_penalty": -1.5, "presence_penalty": -0.3},
    "bias": {"logit_bias": {300 + token: (token - 20) / 3 for token in range(40)}},
    "many_biases": {"logit_bias": {4 * token: token % 7 - 3.0 for token in range(LIST_CAPACITY)}},
    "allowed": {"allowed_token_ids": list(range(0, VOCAB, 3)), "temperature": 0.0},
    "one_allowed": {"allowed_token_ids": [VOCAB - 1, VOCAB - 1]},
    "bad_words": {"bad_words": ["a pair"], "temperature": 0.0},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "temperature": 0.0},
    "all_processors": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": {20: 3.0, 21: -2.0},
        "allowed_token_ids": list(range(10, VOCAB)),
        "bad_words": ["a pair"],
        "min_tokens": 9,
        "ignore_eos": False,
        "top_k": 30,
    },
}
LOGPROBS: dict[str, dict[str, Any]] = {
    "sampled": {"logprobs": 0},
    "most_probable": {"logprobs": 5, "temperature": 0.0},
    "as_many_as_fit": {"logprobs": GRAPH_LOGPROBS},
    "of_processed": {"logprobs": 3, "logit_bias": {30: 8.0}, "repetition_penalty": 1.3},
}
BEYOND: dict[str, dict[str, Any]] = {
    "too_many_biases": {"logit_bias": {3 * token: token % 5 - 2.0 for token in range(LIST_CAPACITY + 1)}},
    "more_logprobs": {"logprobs": GRAPH_LOGPROBS + 1},
    "too_many_logprobs": {"logprobs": MAX_SELECTED + 1},
    "all_logprobs": {"logprobs": -1, "temperature": 0.0},
}
PLAIN_ONES: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9}]


USED: "weakref.WeakKeyDictionary[ModelRunnerV2, set[SamplingVariant | None]]" = weakref.WeakKeyDictionary()


def params_of(*settings: dict[str, Any]) -> list[SamplingParams]:
    return [SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **one}) for one in settings]


def captured_runner(settings: DraftSettings = NO_DRAFTING, device: RecordingDevice | None = None) -> ModelRunnerV2:
    runner = make_runner("v2", settings, device=device or StrictDevice(), ops=unwatched(cpu_kernels()))
    assert isinstance(runner, ModelRunnerV2)
    captured = CaptureTable.captured
    USED[runner] = used = set()

    def note(*arguments: Any) -> SamplingVariant | None:
        used.add(captured(*arguments))
        return captured(*arguments)

    object.__setattr__(runner.graphs.table, "captured", partial(note, runner.graphs.table))
    return runner


@pytest.fixture(autouse=True)
def _attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with the same bits at every padding, for a device that replays graphs by running their work again."""
    attention = type(cpu_kernels().attention)
    monkeypatch.setattr(attention, "is_capturable", True)
    monkeypatch.setattr(runner_lives, "CapturableAttention", attention)


def lives_in(kind: str, params: list[SamplingParams]) -> dict[str, runner_lives.Life]:
    """In a runner that runs all steps eagerly."""
    return live(in_one_runner(make_runner(kind)), params)


def variants(runner: ModelRunnerV2) -> set[SamplingVariant | None]:
    """What graphs have sampled; None: sampling was eager, after a graph."""
    return USED[runner]


def test_a_shutdown_frees_the_graphs() -> None:
    """NCCL's communicators, which are destroyed next, wait for that."""
    runner = captured_runner()
    live(in_one_runner(runner), params_of(*PLAIN_ONES))
    graphs = [weakref.ref(graph) for graph in runner.graphs.captured.values()]
    assert graphs and all(graph() is not None for graph in graphs)
    runner.shutdown()
    assert [graph() for graph in graphs] == [None] * len(graphs)


@pytest.mark.parametrize("feature", BEYOND)
def test_features_outside_graphs_are_sampled_eagerly(feature: str) -> None:
    params = params_of(*PLAIN_ONES, PROCESSORS["all_processors"], BEYOND[feature], LOGPROBS["of_processed"])
    params += params_of({"max_tokens": 40, "frequency_penalty": 1.0})
    runner = captured_runner()
    got = live(in_one_runner(runner), params)
    for kind in ("v1", "v2"):
        assert_same(got, lives_in(kind, params), tolerance=0.0)
    # once the request has ended, the others are in graphs again
    assert variants(runner) >= {None, EVERYTHING}


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_no_step_waits_and_logprobs_are_one_copy_more(depth: int) -> None:
    features = {"frequency_penalty": 1.0, "logit_bias": {30: 1.0}, "bad_words": ["a pair"], "logprobs": 4}
    params = params_of(*PLAIN_ONES, features)
    device = StrictDevice()
    runner = captured_runner(device=device)
    counts = []

    def execute(output: Any) -> Any:
        device.counts.clear()
        runner.execute_model(output)
        pending = runner.sample_tokens(None)
        counts.append(dict(device.counts))
        return pending

    assert_same(live(execute, params, depth=depth), lives_in("v2", params), tolerance=0.0)
    # the forward pass that all samplers share, and this sampling
    assert counts[6:-1] == [{"copy_in": 1, "replay": 2, "copy_out": 2}] * (len(counts) - 7)
    assert len(counts) > 20
