"""Model Runner V2 by itself: its requests to the device, what its warm-up leaves behind, and its staging ring."""

import functools
import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.helpers import runner_lives
from tests.helpers.recording_device import RecordingDevice
from tests.helpers.runner_lives import in_one_runner, queue_step, take_steps

from fleetfoot.assets import embedded_model_path
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.runner.graphs import StepShape
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.sampling.shape import PLAIN
from fleetfoot.scheduler.scheduler import Scheduler

MAX_NUM_SEQS = 8
make_runner = functools.partial(runner_lives.make_runner, "v2", max_num_seqs=MAX_NUM_SEQS, max_model_len=128)
make_scheduler = functools.partial(runner_lives.make_scheduler, max_num_seqs=MAX_NUM_SEQS)


def add(scheduler: Scheduler, name: str, size: int, max_tokens: int = 60, **features: Any) -> Request:
    params = SamplingParams(max_tokens=60, ignore_eos=True, **features)
    prompt: Any = [10 + i for i in range(size)]
    request = Request(name, prompt, params, max_tokens=max_tokens, seed=sum(name.encode()))
    scheduler.add_request(request)
    return request


def add_several(scheduler: Scheduler, sizes: list[int], *args: Any, **features: Any) -> list[Request]:
    return [add(scheduler, f"r{number}", size, *args, **features) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("features", [{"temperature": 0.0}, {"temperature": 0.9}], ids=["greedy", "random"])
def test_a_steady_decode_step_is_one_copy_in_one_copy_out_and_no_wait(features: dict[str, float]) -> None:
    device = RecordingDevice()
    runner, scheduler = make_runner(device=device), make_scheduler()
    add_several(scheduler, [3, 4, 5, 6, 7], **features)
    take_steps(scheduler, in_one_runner(runner), 3)  # the prefill, and the first decodes
    for _ in range(12):  # across a block border, where a block id is staged: still one copy
        device.counts.clear()
        output, pending = queue_step(scheduler, in_one_runner(runner))
        assert output.num_decodes == len(output.rows) == 5
        assert device.counts == {"copy_in": 1, "copy_out": 1}
        result = pending.get()
        assert device.counts["wait_copy_out"] == 1
        scheduler.update(output, result)


def test_a_captured_decode_step_is_one_copy_and_one_launch() -> None:
    device = RecordingDevice(has_graphs=True)
    runner, scheduler = make_runner(device=device), make_scheduler()
    runner.warm_up()
    assert device.counts["capture"] == len(runner.graphs.captured) == len(runner.graphs.table.graphs) > 20
    for number in range(3):
        add(scheduler, f"r{number}", 3, temperature=number / 2)
    for step in range(6):
        device.counts.clear()
        output, pending = queue_step(scheduler, in_one_runner(runner))
        if step > 0:
            assert device.counts == {"copy_in": 1, "replay": 1, "copy_out": 1}
        scheduler.update(output, pending.get())
    assert runner.graphs.num_steps == {"mixed": 1, "decode": 5}


def run_lives(runner: ModelRunnerV2, seed: int) -> dict[str, list[int]]:
    """Requests that come and go at random; their tokens."""
    rng = random.Random(seed)
    scheduler = make_scheduler()
    requests: list[Request] = []
    every: list[dict[str, Any]] = [{}, {"top_k": 5}, {"logprobs": 2}, {"presence_penalty": 1.0}, {"temperature": 0.0}]
    while len(requests) < 12 or scheduler.has_unfinished:
        if len(requests) < 12 and rng.random() < 0.5:
            chosen = rng.choice(every)
            requests.append(add(scheduler, f"r{len(requests)}", rng.randint(1, 50), rng.randint(1, 20), **chosen))
        if scheduler.has_unfinished:
            take_steps(scheduler, in_one_runner(runner), 1)
    scheduler.check_idle()
    return {request.request_id: request.token_ids.tolist() for request in requests}


def test_contexts_that_grow_change_graphs() -> None:
    """Graphs for short contexts are not used for longer ones, and are given a bound that holds."""
    captured = make_runner(device=RecordingDevice(has_graphs=True))
    captured.graphs.table = replace(captured.graphs.table, short_contexts=((1, 100), (2, 50), (4, 25)))
    captured.graphs.drop_all()
    captured.warm_up()
    used: set[tuple[int, int]] = set()
    graph = captured.graphs._graph

    def watched(shape: StepShape, *arguments: Any) -> Any:
        if shape.kind == "decode":
            used.add((shape.num_reqs, shape.max_context))
        return graph(shape, *arguments)

    captured.graphs._graph = watched
    lives = [run_lives(captured, seed) for seed in range(8)]
    assert lives == [run_lives(make_runner(), seed) for seed in range(8)]
    assert {(1, 100), (2, 50), (2, 0), (4, 0)} <= used


def test_a_host_buffer_is_not_written_before_its_reader_has_passed() -> None:
    device = RecordingDevice()
    staging = make_runner(device=device)._state.staging
    device.events.clear()
    device.is_behind = True
    num_slots = len(staging._host)
    for step in range(2 * num_slots):
        staging.begin()
        staging.write(0, step, 1)
        staging.apply_staged_writes([0], staging._numpy[0][:2] * 0, 1)
    assert device.events == ["copy_in"] * num_slots + ["wait_copy_in", "copy_in"] * num_slots


def test_more_than_a_buffer_holds_is_sent_ahead() -> None:
    results, pages = [], []
    for max_writes in (35, None):  # a prompt of 12 takes 33 of them
        runner, scheduler = make_runner(), make_scheduler()
        runner._state.staging.max_writes = max_writes or runner._state.staging.max_writes
        add_several(scheduler, [12, 12, 12])
        _, pending = queue_step(scheduler, in_one_runner(runner))
        results.append(pending.get().sampled_token_ids)
        pages.append(runner._state.tables.token_pages)
    assert results[0] == results[1]
    assert torch.equal(*pages)


def test_warm_up_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def observed(*_: object) -> None:
        raise AssertionError("the warm-up went through execute_model")

    warm, cold = make_runner(), make_runner()
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunnerV2, "execute_model", observed)
        patch.setattr(ModelRunnerV2, "sample_tokens", observed)
        warm.warm_up()
    assert not warm.graphs.num_steps
    assert warm._sampler.variant == PLAIN
    assert not warm._sampler._requests
    requests = []
    for runner in (warm, cold):
        scheduler = make_scheduler()
        requests.append(add(scheduler, "a", 20, temperature=1.0))
        take_steps(scheduler, in_one_runner(runner), 10)
    assert requests[0].token_ids.tolist() == requests[1].token_ids.tolist()


def test_calls_out_of_order_are_refused() -> None:
    runner = make_runner()
    with pytest.raises(RuntimeError, match="without an execute_model before it"):
        runner.sample_tokens(None)
    runner.shutdown()
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    output = scheduler.schedule()
    assert output is not None
    with pytest.raises(RuntimeError, match="before load_model"):
        runner.execute_model(output)


def test_a_capture_runs_few_layers_before_it_captures_all() -> None:
    """Those that launch all kernels."""
    device = RecordingDevice(has_graphs=True)
    runner = make_runner(folder=embedded_model_path(), device=device)
    (run,) = runner._model.model.layers._runs
    num_layers: list[int] = []

    def note(run: Any, x: torch.Tensor, ctx: Any) -> torch.Tensor:
        num_layers.append(len(run.layers))
        return x if ctx.logits is None else ctx.logits.select(x)

    with patch.object(type(run), "__call__", note):
        runner.capture_graphs()
    forwards = [key for key in runner.graphs.captured if key.part == "forward"]
    wholes = [key for key in runner.graphs.captured if key.part == "step"]
    assert num_layers == [2, len(run.layers)] * len(forwards) + [len(run.layers)] * len(wholes)
    assert len(run.layers) > 2
