"""A scheduler between a fake runner, a fake connector and a fake pipeline: steps are queued, and retired later."""

import random
from collections import deque
from collections.abc import Callable

from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import EngineOutput, ModelRunnerOutput, SchedulerOutput
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.helpers.fake_connector import Behaviour, FakeSchedulerConnector, FakeWorkers
from tests.helpers.fake_runner import FakeRunner, reference

VOCAB = 11  # small, so that prompts share prefixes and stop tokens come up


class RandomController:
    """Proposes drafts at random."""

    off_reason = "luck"

    def __init__(self, num_drafts: int, probability: float, rng: random.Random) -> None:
        self.num_drafts = num_drafts
        self.probability = probability
        self._rng = rng

    def choose(self, num_decodes: int) -> int:
        assert num_decodes > 0
        return self.num_drafts if self._rng.random() < self.probability else 0

    def observe(
        self, num_decodes: int, num_drafts: int, num_drafted: int, num_accepted: int, num_tokens: int, seconds: float
    ) -> None:
        assert 0 <= num_accepted <= num_drafted <= num_decodes * num_drafts
        assert num_tokens >= num_decodes * (1 + num_drafts)


class FakeDevice:
    """Runner, workers of the connector, and first rank; runs steps, as an executor too.

    Args:
        scheduler: blocks that its pool has as free must not be written.
        num_ranks: ranks that report transfers.
        accuracy: of drafts.
    """

    runner_name = "fake"

    def __init__(self, scheduler: Scheduler, rng: random.Random, *, num_ranks: int = 1, accuracy: float = 0.7) -> None:
        config, connector = scheduler.config, scheduler.transfers.connector
        self.runner = FakeRunner(
            config.block_size,
            VOCAB,
            num_drafts=config.num_drafts,
            accuracy=accuracy,
            has_draft_kv=config.num_lookahead > 0,
            pools=scheduler.pools,
            groups=scheduler.config.groups,
            seed=rng.randrange(2**32),
        )
        self.connector = connector if isinstance(connector, FakeSchedulerConnector) else None
        self.workers = None if self.connector is None else FakeWorkers(self.connector, self.runner, num_ranks, rng)
        self.first_rank = FirstRank(self.runner) if config.num_stages > 1 else None
        self.invalid: dict[str, int] = {}
        """Request id -> the number of its output tokens, from 1, that is invalid if it is a step's last one."""
        self._result = ModelRunnerOutput([])

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        runner = self.runner
        if self.first_rank is not None:
            self.first_rank.prepare(output)
        if self.workers is not None:
            self.workers.begin(output)
        runner.apply(output)
        if self.connector is not None:
            scheduled = {runner.rows[row].request_id for row in output.rows}
            assert not scheduled & self.connector.loading, "a request computes while its KV is being loaded"
        if self.first_rank is not None:
            self.first_rank.check(output)
            self.first_rank.compute(output)
        result = runner.compute(output)
        if self.first_rank is not None:
            self.first_rank.send(output)
        if self.workers is not None:
            result.kv_connector_output = self.workers.end()
        for index, row in enumerate(output.rows[: output.num_sampled]):
            request = runner.rows[row]
            if self.invalid.get(request.request_id) == len(request.token_ids) - request.num_prompt_tokens:
                result.invalid[index] = "NaN"
        return result

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._result = self.run(scheduler_output)

    def sample_tokens(self, grammar_output: object | None) -> ModelRunnerOutput:
        return self._result

    def shutdown(self) -> None:
        pass


Hook = Callable[[dict[str, Request], bool], None]


class Loop:
    """A scheduler and ``run``, which runs its steps; ``depth`` steps may be in flight when another is queued."""

    def __init__(self, scheduler: Scheduler, run: Callable[[SchedulerOutput], ModelRunnerOutput], depth: int) -> None:
        self.scheduler, self.run, self.depth = scheduler, run, depth
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.num_idle_steps = 0

    def step(self) -> list[EngineOutput]:
        """Queue a step, if there is one, and retire the oldest as `EngineCore.step_overlapped` does."""
        results: list[EngineOutput] = []
        output = self.scheduler.schedule()
        if output is not None:
            assert output.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
            assert not output.is_idle or not self.in_flight, "an idle step would hold up those in flight"
            self.num_idle_steps += output.is_idle
            self.in_flight.append((output, self.run(output)))
        if self.in_flight and (len(self.in_flight) > self.depth or output is None or output.is_idle):
            oldest, result = self.in_flight.popleft()
            results = self.scheduler.update(oldest, result)
            self.scheduler.drafting.observe(oldest, 1.0)
        else:
            assert output is not None or not self.scheduler.has_unfinished, "requests wait, and nothing is under way"
        self.scheduler.check_integrity()
        return results

    def run_random_requests(self, rng: random.Random, make: Callable[[str], Request], disturb: Hook) -> list[Request]:
        """Requests arrive and are aborted; each step, ``disturb`` gets those that run, and whether all have arrived."""
        scheduler, running, requests = self.scheduler, dict[str, Request](), list[Request]()
        total = rng.randint(1, 12)
        while len(requests) < total or self.in_flight or scheduler.has_unfinished or scheduler.transfers.has_pending:
            if len(requests) < total and (not running or rng.random() < 0.5):
                requests.append(make(f"r{len(requests)}"))
                running[requests[-1].request_id] = requests[-1]
                scheduler.add_request(requests[-1])
            if running and rng.random() < 0.1:
                victim = rng.choice(sorted(running))
                assert scheduler.finish(victim, RequestStatus.FINISHED_ABORTED) is running.pop(victim)
            disturb(running, len(requests) == total)
            self.step()
            running = {name: request for name, request in running.items() if not request.is_finished}
        scheduler.check_idle()
        assert scheduler.pools.num_used == 0
        assert scheduler.transfers.num_held_blocks == 0
        return requests


def check_output(request: Request, policy: str, num_valid: int = 10**6) -> None:
    """The tokens of the fake model for the request alone, of which ``num_valid`` are valid; or a beginning of them."""
    expected, got = expected_output(request), request.output_token_ids
    if request.status == RequestStatus.FINISHED_ABORTED or request.stop_reason == "text":
        assert got == expected[: len(got)]
    elif request.stop_reason == "NaN":
        assert (request.finish_reason, got) == ("error", expected[:num_valid])
    elif request.status == RequestStatus.FINISHED_ERROR:
        assert policy == "fail" and "its KV could not be loaded: " in str(request.stop_reason)
        assert got == expected[: len(got)]
    else:
        assert got == expected
        assert request.stop_reason == (got[-1] if request.finish_reason == "stop" else None)


class FakeEngine(Loop):
    """An engine without outputs.

    Args:
        behaviour: of a KV connector; None: there is none.
        num_ranks, accuracy: see `FakeDevice`.
        drafting: probability that a step proposes drafts.
    """

    def __init__(
        self, config: SchedulerConfig, rng: random.Random, *, behaviour: Behaviour | None = None, num_ranks: int = 1,
        accuracy: float = 0.7, drafting: float = 0.9, depth: int = 0,
    ) -> None:  # fmt: skip
        self.connector = None if behaviour is None else FakeSchedulerConnector(config.block_size, rng, behaviour)
        controller = RandomController(config.num_drafts, drafting, rng)
        scheduler = Scheduler(config, connector=self.connector, controller=controller)
        self.device = FakeDevice(scheduler, rng, num_ranks=num_ranks, accuracy=accuracy)
        super().__init__(scheduler, self.device.run, depth)

    def change_weights(self) -> None:
        """KV that was computed before must not be used any more."""
        self.device.runner.weights += 1
        if self.in_flight:
            self.scheduler.reset_prefix_cache(reset_connector=True)
        else:
            self.scheduler.change_weights(str(self.device.runner.weights))

    def settle(self) -> None:
        """Step until nothing is in flight, held or pending."""
        while self.in_flight or self.scheduler.has_unfinished or self.scheduler.transfers.has_pending:
            self.step()
        self.scheduler.check_idle()
        assert self.scheduler.transfers.num_held_blocks == 0
        assert self.scheduler.pools.num_used == 0


def expected_output(request: Request) -> list[int]:
    """The output of the fake model for the request alone."""
    prompt, stops = request.prompt_token_ids, request.stop_token_ids
    return reference(prompt, request.max_tokens, stops, request.params.min_tokens, VOCAB)


Packet = list[tuple[int, int, int, list[int]]]
"""For each request that sampled in a step: its row, last token, tokens computed, and drafts."""


class FirstRank:
    """Makes each step's inputs out of packets, and compares them with what the last rank has.

    Args:
        last_rank: the reference. It runs a step after `prepare`.
    """

    def __init__(self, last_rank: FakeRunner) -> None:
        self._last_rank = last_rank
        self._packets: list[Packet] = []  # of all steps
        self._num_applied = 0
        self._rows: dict[int, tuple[int, int, list[int]]] = {}

    def prepare(self, output: SchedulerOutput) -> None:
        assert output.awaited_step < output.step == len(self._packets)
        while self._num_applied <= output.awaited_step:
            for row, token, computed, drafts in self._packets[self._num_applied]:
                self._rows[row] = token, computed, drafts
            self._num_applied += 1
        for request in output.new_requests:
            self._rows[request.row] = request.token_ids[-1], request.num_computed_tokens, []

    def compute(self, output: SchedulerOutput) -> None:
        """Count the computed tokens of chunks of prompts."""
        counts = output.num_scheduled_tokens
        for row, count in list(zip(output.rows, counts, strict=True))[output.num_decodes :]:
            token, computed, drafts = self._rows[row]
            self._rows[row] = token, computed + count, drafts

    def check(self, output: SchedulerOutput) -> None:
        """After the last rank has applied the changes of rows, and before it computes."""
        for index, row in enumerate(output.rows):
            token, computed, drafts = self._rows[row]
            assert self._last_rank.computed[row] == computed, "a stage computes at another position"
            if index >= output.num_decodes:
                continue
            assert self._last_rank.rows[row].token_ids[-1] == token, "a stage computes an old token"
            if output.num_drafts and drafts:
                assert self._last_rank.drafts[row] == drafts, "a stage verifies other drafts"

    def send(self, output: SchedulerOutput) -> None:
        """After the last rank has computed."""
        last = self._last_rank
        self._packets.append(
            [
                (row, last.rows[row].token_ids[-1], last.computed[row], list(last.drafts.get(row, [])))
                for row in output.rows[: output.num_sampled]
            ]
        )
