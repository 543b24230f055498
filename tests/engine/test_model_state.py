"""A family with state of its own: every point at which a step calls a `ModelState`, held against the same family
without state."""

from typing import Any

import pytest
import torch
from tests.helpers import runner_lives as lives
from tests.helpers.local_pipeline import LocalPipeline, local_pipeline
from tests.helpers.recording_device import RecordingDevice

from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.kernels.prepare.tables import StepBuffers
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.models.model_state import ModelState, StateSizes
from fleetfoot.records.forward_context import ForwardContext, IntermediateTensors
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import NewRequest, SchedulerOutput
from fleetfoot.runner.base import ModelRunner
from fleetfoot.speculative.drafter import DraftSettings
from fleetfoot.weights import loading

PERIOD = 7


class PositionsOfBatch(ModelState):
    """Adds a vector for each position, modulo PERIOD: the first half of it in place of the embedding, the second on
    each rank. Positions are those of the step."""

    def __init__(self, model: LlamaForCausalLM, sizes: StateSizes) -> None:
        self.model = model
        self.running: set[int] = set()
        generator = torch.Generator().manual_seed(1)
        self.vectors = torch.randn(PERIOD, model.config.hidden_size, generator=generator)

    def prepare_inputs(self, batch: StepBuffers) -> torch.Tensor:
        return self.vectors[batch.positions % PERIOD]  # [num_tokens, hidden_size]

    def embed(self, batch: StepBuffers, received: IntermediateTensors | None) -> IntermediateTensors | None:
        if received is not None:
            return received
        return IntermediateTensors(self.model.embed(batch.input_ids) + self.prepare_inputs(batch))


class PositionsOfRows(PositionsOfBatch):
    """The same, with positions that it counts itself."""

    def __init__(self, model: LlamaForCausalLM, sizes: StateSizes) -> None:
        super().__init__(model, sizes)
        self.counts = torch.zeros(sizes.max_num_seqs + 1, dtype=torch.int64)  # the last row is that of padding

    def add(self, request: NewRequest) -> None:
        assert request.row not in self.running
        self.running.add(request.row)
        self.counts[request.row] = request.num_computed_tokens

    def remove(self, row: int) -> None:
        self.running.discard(row)

    def prepare_inputs(self, batch: StepBuffers) -> torch.Tensor:
        request = batch.batch_index.clamp(min=0).to(torch.int64)  # [num_tokens]
        offset = torch.arange(len(request)) - batch.query_start_loc[request]
        positions = self.counts[batch.idx_mapping[request].to(torch.int64)] + offset
        return self.vectors[positions.clamp(min=0) % PERIOD]

    def post_update(self, batch: StepBuffers) -> None:
        lengths = batch.query_start_loc.diff().to(torch.int64)
        self.counts.index_add_(0, batch.idx_mapping.to(torch.int64) % len(self.counts), lengths)

    def reject(self, rows: torch.Tensor, num_rejected: torch.Tensor) -> None:
        self.counts.index_add_(0, rows.to(torch.int64) % len(self.counts), -num_rejected.to(torch.int64))


class ToyForCausalLM(LlamaForCausalLM):
    state_class: type[PositionsOfBatch] = PositionsOfRows

    def make_state(self, sizes: StateSizes) -> ModelState:
        return self.state_class(self, sizes)

    def forward(
        self, input_ids: torch.Tensor, ctx: ForwardContext, intermediate_tensors: IntermediateTensors | None = None
    ) -> torch.Tensor | IntermediateTensors:
        assert intermediate_tensors is not None
        x = intermediate_tensors.hidden_states + ctx.family_inputs
        return super().forward(input_ids, ctx, IntermediateTensors(x))


REQUESTS = [SamplingParams(max_tokens=30, temperature=number % 3 * 0.5, ignore_eos=True) for number in range(9)]


def live(
    size: int, *, drafts: bool = False, has_graphs: bool = False, num_blocks: int = 64, expected: Any = None
) -> dict[str, lives.Life]:
    """The lives of requests, in as many stages."""
    config, runners = load_model_config(lives.DRAFT), []
    drafter = lives.ScriptedDrafter(share_of_errors=0.4) if drafts else None
    for pipeline in local_pipeline(size, config.hidden_size if has_graphs else None):
        settings = DraftSettings(lives.NUM_DRAFTS * drafts, drafter=drafter if pipeline.is_last_rank else None)
        layers = None if size == 1 else pipeline_layers(config, pipeline.rank, size)
        device = RecordingDevice(has_graphs=has_graphs)
        runner: ModelRunner = lives.make_runner("v2", settings, device=device, pipeline=pipeline, layers=layers)
        if has_graphs and size == 1:
            runner.warm_up()
        runners.append(runner)
    execute = lives.in_one_runner(runners[0]) if size == 1 else LocalPipeline(runners).execute
    num_drafts = lives.NUM_DRAFTS * drafts
    scheduler = lives.make_scheduler(num_drafts, num_lookahead=num_drafts, num_stages=size, num_blocks=num_blocks)
    done = lives.live(execute, REQUESTS, scheduler=scheduler, drafter=drafter, expected=expected)
    for runner in runners:
        runner.execute_model(SchedulerOutput(99, [], [], 0, 0, 0, finished=[("", row) for row in range(8)]))
        assert not runner._family.running
    return done


@pytest.fixture(scope="module")
def expected() -> dict[int, dict[str, lives.Life]]:
    """Of the family without state, by the number of stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "model_class", lambda config: ToyForCausalLM)
        patch.setattr(ToyForCausalLM, "state_class", PositionsOfBatch)
        return {size: live(size) for size in (1, 2)}


CASES: dict[str, dict[str, Any]] = {
    "eager": {"size": 1},
    "graphs": {"size": 1, "has_graphs": True},
    "drafts": {"size": 1, "drafts": True},
    "drafts in graphs": {"size": 1, "drafts": True, "has_graphs": True},
    "pipeline": {"size": 2},
    "pipeline with drafts": {"size": 2, "drafts": True},
    "preemption": {"size": 1, "drafts": True, "num_blocks": 24},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_state_of_a_family_follows_its_requests(
    case: dict[str, Any], expected: dict[int, dict[str, lives.Life]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "model_class", lambda config: ToyForCausalLM)
    without_state = expected[case["size"]]
    lives.assert_same(live(**case, expected=without_state), without_state)
