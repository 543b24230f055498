"""A soak: random requests with aborts, preemptions, faults of a KV connector, restarts, weight updates, sleeps.

    python benchmarks/soak.py --requests 100000

Prints a line of progress now and then, and a JSON report at the end. It fails if anything is left over (KV blocks,
rows, processes, file descriptors, shared memory), if a request did not end exactly once, or if the greedy tokens of a
control request have changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from fleetfoot import LLMEngine, RequestOutput, SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import (
    BLOCK_CONTIGUOUS_HND,
    KVConnector,
    SchedulerConnector,
    TransferContext,
    WorkerConnector,
)
from fleetfoot.kv_transfer.blockstore.connector import OffloadingConnector
from fleetfoot.records.step import KVConnectorOutput, TransferFailure

VOCAB = range(6, 2000)
CONTROL = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@dataclasses.dataclass
class Faults:
    """Faults of the connector. Each process has a copy of its own."""

    seed: int
    load_failures: float
    """The share of loads that fail."""
    mean_steps: int
    """Between two errors of a process; no two follow each other at once. 0: no errors."""
    kills: bool = False
    """Whether an error is the end of the process, by SIGKILL."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.num_loads = self.num_errors = 0
        self._left = self._distance()

    def __getstate__(self) -> dict[str, Any]:
        """A worker process has other faults than its predecessor."""
        self.seed += 1
        return dataclasses.asdict(self)

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__init__(**fields)  # type: ignore[misc]

    def _distance(self) -> int:
        return self.rng.randint(self.mean_steps // 2, 3 * self.mean_steps // 2)

    def strike(self) -> None:
        """Raise, or kill the process, if it is time."""
        self._left -= 1
        if not self.mean_steps or self._left > 0:
            return
        self._left = self._distance()
        self.num_errors += 1
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("injected")


class SoakConnector(KVConnector):
    """KV in host memory, with faults of the setting ``faults``."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def _inner(context: TransferContext) -> TransferContext:
        extra = {"num_cpu_blocks": context.config.kv_connector_extra_config["num_cpu_blocks"]}
        inner = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return dataclasses.replace(context, config=KVTransferConfig.parse(inner))

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        return OffloadingConnector.scheduler_side(SoakConnector._inner(context))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        faults: Faults = context.config.kv_connector_extra_config["faults"]
        worker: Any = OffloadingConnector.worker_side(SoakConnector._inner(context))
        start_load_kv, save_kv, get_finished = worker.start_load_kv, worker.save_kv, worker.get_finished

        def struck(call: Any) -> Any:
            def called() -> None:
                if faults.rng.random() < 0.5:
                    faults.strike()
                call()

            return called

        def finished_with_faults(finished_req_ids: set[str]) -> KVConnectorOutput:
            output: KVConnectorOutput = get_finished(finished_req_ids)
            for request_id in sorted(output.loaded):
                if faults.rng.random() < faults.load_failures:
                    faults.num_loads += 1
                    output.loaded.discard(request_id)
                    output.failed[request_id] = TransferFailure("injected")
            return output

        worker.start_load_kv, worker.save_kv = struck(start_load_kv), struck(save_kv)
        worker.get_finished = finished_with_faults
        return worker  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Resources:
    """What this process has."""

    rss: int
    """Bytes."""
    descriptors: int
    threads: int
    children: int
    shared: int
    """Mappings of shared memory, and folders of engines."""

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        maps = Path("/proc/self/maps").read_text().count("/dev/shm/")
        shared = maps + len(list(Path(tempfile.gettempdir()).glob("fleetfoot-*")))
        counts = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(children), shared
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), *counts)


class Soak:
    """Random requests on an engine, and what became of them."""

    def __init__(self, engine: LLMEngine, faults: Faults, *, seed: int, num_live: int, event_share: float) -> None:
        self.engine = engine
        self.faults = faults
        self.events: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._rng = random.Random(seed)
        self._num_live, self._event_share = num_live, event_share
        self._live: set[str] = set()
        self._number = 0
        self._shared = [self._rng.choice(VOCAB) for _ in range(48)]
        self._control: list[int] = []

    def run(self, num_requests: int) -> None:
        """Run so many more requests to their ends."""
        last = self._number + num_requests
        while self._live or self._number < last:
            while len(self._live) < self._num_live and self._number < last:
                self._add()
            if self._rng.random() < self._event_share:
                self._intervene()
            for request_id in [name for name in sorted(self._live) if self._rng.random() < 0.005]:
                self.engine.abort_request(request_id)
            for output in self.engine.step():
                if output.finished:
                    self._end(output)

    def _add(self) -> None:
        rng, self._number = self._rng, self._number + 1
        request_id = f"control-{self._number}" if self._number % 50 == 1 else f"r{self._number}"
        if request_id.startswith("control"):
            prompt, params = self._shared[:20], CONTROL
        else:
            prompt = self._shared[: rng.randint(0, 40)] + [rng.choice(VOCAB) for _ in range(rng.randint(1, 12))]
            temperature = rng.choice([0.0, 0.8, 1.3])
            params = SamplingParams(
                max_tokens=rng.choice([1, 4, 8, 24]),
                temperature=temperature,
                top_k=rng.choice([0, 0, 20]),
                n=2 if temperature and rng.random() < 0.3 else 1,
                logprobs=rng.choice([None, None, 1]),
                seed=rng.randrange(2**31),
                detokenize=False,
            )
        self._live.add(request_id)
        self.engine.add_request(request_id, prompt, params)

    def _intervene(self) -> None:
        """Between steps: an update of the weights, by the same ones, a sleep, or a cleared cache."""
        kind = self._rng.choice(["reload_weights", "reset_prefix_cache", "sleep"])
        mode = self._rng.choice(["drain", "wait", "keep"])
        self.events[kind] += 1
        if kind == "reload_weights":
            self.engine.reload_weights(mode=mode)
        elif kind == "sleep":
            self.engine.sleep(level=self._rng.choice([1, 2]), mode="wait" if mode == "drain" else "keep")
            self.engine.wake_up()
        else:
            self.engine.reset_prefix_cache(reset_running_requests=mode == "wait", reset_connector=mode != "keep")

    def _end(self, output: RequestOutput) -> None:
        name, completion = output.request_id, output.outputs[0]
        if name not in self._live:
            self.wrong.append(f"{name} has ended again")
        self._live.discard(name)
        self.reasons[str(completion.finish_reason)] += 1
        if name.startswith("control") and completion.finish_reason != "abort":
            self._control = self._control or completion.token_ids
            if completion.token_ids != self._control:
                self.wrong.append(f"{name} has other tokens: {completion.token_ids} instead of {self._control}")


@contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Without the folders of other engines."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
        yield


def slope(samples: list[tuple[int, int]]) -> float:
    """Of the line through (x, y) with the least squares."""
    mean_x, mean_y = (sum(values) / len(samples) for values in zip(*samples, strict=True))
    square = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / square if square else 0.0


@own_temporary_folder()
def soak(
    num_requests: int,
    *,
    num_reports: int = 20,
    num_live: int = 24,
    seed: int = 0,
    mean_steps: int = 1500,
    event_share: float = 0.005,
    load_failures: float = 0.05,
    kills: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Run a soak, and return its report. ``settings``: of the engine. Raises AssertionError if anything is wrong."""
    faults = Faults(seed, load_failures=load_failures, mean_steps=mean_steps, kills=kills)
    connector = {
        "kv_connector": "SoakConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "benchmarks.soak",
        "kv_connector_extra_config": {"faults": faults, "num_cpu_blocks": 200},
    }
    defaults: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 2 * num_live // 3,
        "max_num_batched_tokens": 4 * num_live + 32,
        "max_model_len": 128,
        "block_size": 8,
        "num_gpu_blocks_override": max(36, num_live),  # too few: requests are preempted
        "enable_sleep_mode": True,
        "on_error": "restart",
        "max_restarts": 10**9,
        "kv_transfer_config": connector,
    }
    config = EngineConfig(**{**defaults, **settings})
    resource_tracker.ensure_running()  # of multiprocessing: it stays
    before, begin = Resources.now(), time.perf_counter()
    engine = LLMEngine.from_config(config)
    load = Soak(engine, faults, seed=seed, num_live=num_live, event_share=event_share)
    samples: list[tuple[int, int]] = []
    first = None
    for report in range(num_reports):
        load.run(num_requests // num_reports)
        while engine.has_transfers():
            engine.step()
        engine.report_finished()
        engine.core.scheduler.check_idle()
        engine.check_integrity()
        engine.stats_collector.clear_samples()  # its windows grow for 100,000 samples
        now = Resources.now()
        first = first or now
        samples.append(((report + 1) * (num_requests // num_reports), now.rss))
        if verbose:
            print(f"{samples[-1][0]} requests, {time.perf_counter() - begin:.0f} s: {now}", file=sys.stderr, flush=True)
    stats = engine.stats()
    engine.shutdown()
    del engine, load.engine
    after = Resources.now()
    late = samples[len(samples) // 2 :]
    result = {
        "requests": sum(load.reasons.values()),
        "seconds": round(time.perf_counter() - begin, 1),
        "steps": stats.num_steps,
        "tokens": stats.num_generation_tokens,
        "ends": dict(load.reasons),
        "restarts": stats.num_restarts,
        "preemptions": stats.scheduler.num_preemptions,
        "loads": stats.transfers.loads_started,
        "failed_loads": stats.transfers.loads_failed,
        **load.events,
        "rss_mib": [round(rss / 2**20, 1) for _, rss in samples],
        "slope_bytes_per_request": round(slope(late), 2),
        "during": [dataclasses.asdict(first or now), dataclasses.asdict(now)],
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
    }
    assert not load.wrong, load.wrong[:5]
    assert result["requests"] == num_requests // num_reports * num_reports
    assert (after.descriptors, after.children, after.shared) <= (before.descriptors, before.children, before.shared), (
        result
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--reports", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2")
    parser.add_argument("--overlap", action="store_true", help="overlapped scheduling")
    parser.add_argument("--steps-between-errors", type=int, default=1500)
    parser.add_argument(
        "--processes", type=int, default=0, help="ranks of a pipeline, which are killed; 0: no processes"
    )
    parser.add_argument("--live", type=int, default=24, help="requests at a time")
    parser.add_argument("--model", default="story-llama")
    arguments = parser.parse_args()
    logging.getLogger("fleetfoot").setLevel(logging.CRITICAL + 1)
    settings: dict[str, Any] = {"model": arguments.model, "model_runner": arguments.runner}
    if arguments.overlap:
        settings["async_scheduling"] = True
    if arguments.processes:
        settings |= {"distributed_executor_backend": "mp", "pipeline_parallel_size": arguments.processes}
    report = soak(
        arguments.requests,
        num_reports=arguments.reports,
        num_live=arguments.live,
        seed=arguments.seed,
        mean_steps=arguments.steps_between_errors,
        kills=bool(arguments.processes),
        verbose=True,
        **settings,
    )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.soak import main as soak_main

    soak_main()  # of the module that worker processes and the connector's setting name
