"""Schedulers for tests: requests with tokens of their own, and steps with given results."""

from typing import Any

from fleetfoot.records.kv_events import NO_KV_EVENTS, KVEvents
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import EngineOutput, ModelRunnerOutput, SchedulerOutput
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig

LIMITS = {"num_blocks": 32, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
REQUEST_FIELDS = ("priority", "flow", "cache_salt", "eos_token_ids", "kv_transfer_params")


def make_scheduler(
    *requests: Request, connector: Any = None, controller: Any = None, events: KVEvents = NO_KV_EVENTS, **config: Any
) -> Scheduler:
    """A scheduler with small limits and ``requests``."""
    options: dict[str, Any] = {"connector": connector, "controller": controller, "events": events}
    scheduler = Scheduler(SchedulerConfig(**{**LIMITS, **config}), **options)
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def request_of(name: str, prompt: int | list[int] = 5, max_tokens: int = 4, **more: Any) -> Request:
    """A request with ``prompt`` tokens that no other request has, or with these tokens."""
    tokens = [1000 * (1 + ord(name[-1])) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    fields = {key: more.pop(key) for key in REQUEST_FIELDS if key in more}
    params = SamplingParams(max_tokens=max_tokens, **more)
    return Request(name, tokens, params, max_tokens=max_tokens, seed=0, **fields)


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    """The next step; there must be one."""
    output = scheduler.schedule()
    assert output is not None
    scheduler.check_integrity()
    return output


def update(scheduler: Scheduler, output: SchedulerOutput, *sampled: list[int], **more: Any) -> list[EngineOutput]:
    """Update the oldest step. Without ``sampled`` every request samples token 7."""
    result = ModelRunnerOutput(list(sampled) or [[7]] * output.num_sampled, **more)
    results = scheduler.update(output, result)
    scheduler.check_integrity()
    return results


class Drive:
    """Runs a scheduler step by step, and checks which request has which row."""

    def __init__(self, scheduler: Scheduler, *requests: Request) -> None:
        self.scheduler = scheduler
        self.in_flight: list[SchedulerOutput] = []
        self.names: dict[int, str] = {}
        for request in requests:
            scheduler.add_request(request)

    def schedule(self) -> SchedulerOutput:
        output = schedule(self.scheduler)
        for name, row in output.finished:
            assert self.names.pop(row) == name
        for request in output.new_requests:
            assert request.row not in self.names
            self.names[request.row] = request.request_id
        return output

    def batch(self, output: SchedulerOutput) -> dict[str, int]:
        """Request id -> scheduled tokens, in batch order."""
        return {self.names[row]: count for row, count in zip(output.rows, output.num_scheduled_tokens, strict=True)}

    def update(self, output: SchedulerOutput, **more: Any) -> list[EngineOutput]:
        return update(self.scheduler, output, **more)

    def step(self) -> dict[str, int]:
        """Schedule and update a step; returns its `batch`."""
        output = self.schedule()
        batch = self.batch(output)
        self.update(output)
        return batch

    def run(self, *requests: Request) -> None:
        """Step until these requests have ended; without any, until all have and everything is free."""
        for request in requests or list(self.scheduler.requests.values()):
            while not request.is_finished:
                self.step()
        if not requests:
            self.scheduler.check_idle()

    def queue(self) -> str:
        """Schedule a step and leave it in flight; the ids of its requests."""
        self.in_flight.append(self.schedule())
        return "".join(self.batch(self.in_flight[-1]))

    def retire(self) -> None:
        """Update the oldest step of `queue`."""
        self.update(self.in_flight.pop(0))
