"""A soak: random requests with every feature at once, while weights change, workers fail, and the engine sleeps.

    python benchmarks/soak.py --requests 100000
    python benchmarks/soak.py --http --requests 2000

Every output is compared, field by field, with that of a plain engine that has started with the weights that were served
(`benchmarks.soak_oracle`). The soak fails if one differs, if a request does not end exactly once or ends with an error,
if anything is left over (KV blocks, rows, files, sockets, threads, processes, shared memory), or if memory grows.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from benchmarks.soak_oracle import MAX_MODEL_LEN, Case, Oracle, WeightSets, entry_fits, make_cases, ties_allowed

from fleetfoot import LLMEngine, RequestOutput, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.engine import kept_weights
from fleetfoot.kv_transfer.base.connector import (
    ARENA,
    BLOCK_CONTIGUOUS_HND,
    KVConnector,
    SchedulerConnector,
    TransferContext,
    WorkerConnector,
)
from fleetfoot.kv_transfer.blockstore.connector import OffloadingConnector
from fleetfoot.outputs import CompletionOutput
from fleetfoot.records.step import KVConnectorOutput, TransferFailure
from fleetfoot.records.weights import WeightError
from fleetfoot.scheduler.block_pool import BlockPool

MAX_SLOPE = 64.0
"""Bytes of resident memory for each request after the warm-up: 6 MiB in 100,000 requests."""
WARM_UP = 0.4
"""The share of a soak's samples of memory that do not count."""
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False},
    "eagle": {"method": "eagle", "num_speculative_tokens": 2, "adaptive": False},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False},
}


class InjectedError(RuntimeError):
    """A fault that the soak has made."""


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
        self.is_held = False
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
        if self.is_held:  # an error while weights are written ends the engine, as it should
            return
        if not self.mean_steps or self._left > 0:
            return
        self._left = self._distance()
        self.num_errors += 1
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise InjectedError("injected")


class SoakConnector(KVConnector):
    """KV in host memory, with faults of the setting ``faults``."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({ARENA, BLOCK_CONTIGUOUS_HND})

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


def _named(target: str) -> str:
    """A descriptor's target without the numbers that differ each time."""
    return re.sub(r"\d+", "N", target)


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a process has, each kind as a multiset of names."""

    rss: int
    """Bytes."""
    descriptors: Counter[str]
    """Files, sockets, pipes."""
    threads: Counter[str]
    children: Counter[str]
    """Processes."""
    shared: Counter[str]
    """Mappings of shared memory, and files of engines in the folder for temporary files."""

    @classmethod
    def now(cls, pid: int | None = None) -> Resources:
        """Of this process, or of another one."""
        gc.collect()
        process = Path("/proc") / str(pid or os.getpid())
        descriptors, threads, children = Counter[str](), Counter[str](), Counter[str]()
        for entry in (process / "fd").iterdir():
            if entry.is_symlink():  # the one that lists them is closed by now
                descriptors[_named(str(entry.readlink()))] += 1
        for task in (process / "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                threads[_named((task / "comm").read_text().strip())] += 1
                for child in (task / "children").read_text().split():
                    children[_named(Path(f"/proc/{child}/comm").read_text().strip())] += 1
        maps = (process / "maps").read_text().splitlines()
        shared = Counter(_named(line.split()[-1]) for line in maps if "/dev/shm/" in line)
        shared.update(_named(str(path)) for path in Path(tempfile.gettempdir()).glob("fleetfoot-*"))
        pages = int((process / "statm").read_text().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), descriptors, threads, children, shared)

    def left_over(self, before: Resources) -> dict[str, Counter[str]]:
        """What there is now and was not before, by kind."""
        kinds = ("descriptors", "threads", "children", "shared")
        more = {kind: getattr(self, kind) - getattr(before, kind) for kind in kinds}
        return {kind: counts for kind, counts in more.items() if counts}


@dataclasses.dataclass
class Live:
    """A request that has not ended."""

    case: int
    first_version: int
    """Of the weights when it was added."""
    kept_version: int | None = None
    """The first version that it may have gone on with on KV of another one (``keep``)."""
    may_abort: bool = False


class Checker:
    """Compares outputs with the oracle's, and counts."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.numbers = {0: 0}
        """Version of the weights -> the number of their set."""
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def check(self, name: str, live: Live, output: RequestOutput, version: int) -> None:
        """Compare all of a request's outputs; ``version``: the newest."""
        case = self.oracle.cases[live.case]
        if output.prompt_token_ids != case.prompt or len(output.outputs) != case.fields.get("n", 1):
            self.wrong.append(f"{name} has the prompt {output.prompt_token_ids} and {len(output.outputs)} outputs")
        for seen in output.outputs:
            self.reasons[str(seen.finish_reason)] += 1
            self.counts["tokens"] += len(seen.token_ids)
            if problem := self._problem(live, seen, version):
                self.wrong.append(f"{name}, output {seen.index} of {case}: {problem}")
        if problem := self.prompt_problem(live, output, version):
            self.wrong.append(f"{name}, {case}: {problem}")

    def _problem(self, live: Live, seen: CompletionOutput, version: int) -> str | None:
        versions = seen.weight_versions or [seen.weight_version] * len(seen.token_ids)
        if versions != sorted(versions) or (
            versions and not live.first_version <= versions[0] <= versions[-1] <= version
        ):
            return f"its versions {versions} are not within {live.first_version} and {version}"
        if seen.finish_reason not in ("stop", "length", "abort") or (
            seen.finish_reason == "abort" and not live.may_abort
        ):
            return f"it has ended with {seen.finish_reason}: {seen.stop_reason}"
        is_part = seen.finish_reason == "abort"
        numbers = [self.numbers[one] for one in versions]
        problem = self.oracle.problem(live.case, seen, numbers, is_part=is_part)
        self.counts["mixed"] += len(set(numbers)) > 1
        kind = "compared_up_to_an_abort" if is_part else "compared"
        if problem is not None and live.kept_version is not None:
            # It has gone on with KV of two versions, nobody knows how much of each: what came before is compared.
            kind, count = "compared_before_keep", sum(one < live.kept_version for one in versions)
            logprobs = seen.logprobs and seen.logprobs[:count]
            before = CompletionOutput(seen.index, "", seen.token_ids[:count], logprobs=logprobs)
            problem = self.oracle.problem(live.case, before, numbers[:count], is_part=True) if count else None
        self.counts[kind] += 1
        return problem

    def prompt_problem(self, live: Live, output: RequestOutput, version: int) -> str | None:
        """Prompt logprobs fit, each one those of a set of weights that the request has met."""
        asked, seen = self.oracle.cases[live.case].fields.get("prompt_logprobs"), output.prompt_logprobs
        is_started = any(one.token_ids for one in output.outputs)
        if asked is None or seen is None:
            is_right = seen is None and not (asked is not None and is_started)
            return None if is_right else f"prompt_logprobs is {seen!r}"
        if live.kept_version is not None:
            return None
        numbers = {self.numbers[one] for one in range(live.first_version, version + 1)}
        candidates = [self.oracle.output(live.case, number).prompt_logprobs or [] for number in numbers]
        for place, entry in enumerate(seen):
            if not any(entry_fits(entry, expected[place]) for expected in candidates):
                return f"prompt_logprobs[{place}] is {entry!r}"
        is_whole = len(seen) == len(candidates[0])
        return None if is_whole or not is_started else f"{len(seen)} prompt_logprobs"


class Soak:
    """Random requests on an engine, and what became of them."""

    def __init__(self, engine: LLMEngine, checker: Checker, *, seed: int, num_live: int, event_share: float) -> None:
        self.engine = engine
        self.checker = checker
        self.events: Counter[str] = Counter()
        self.num_ended = 0
        self._rng = random.Random(seed)
        self._num_live, self._event_share = num_live, event_share
        self._live: dict[str, Live] = {}
        self.num_added = 0
        self._version = self._weights = 0

    def run(self, num_requests: int) -> None:
        """Run so many more requests to their ends."""
        last = self.num_added + num_requests
        while self._live or self.num_added < last:
            while len(self._live) < self._num_live and self.num_added < last:
                self._add()
            if self._rng.random() < self._event_share:
                self._intervene()
            for request_id in [name for name in self._live if self._rng.random() < 0.003]:
                self._abort(request_id)
            for output in self.engine.step():
                if output.finished:
                    self._end(output)

    def _add(self) -> None:
        self.num_added += 1
        request_id, case = f"r{self.num_added}", self._rng.randrange(len(self.checker.oracle.cases))
        drawn: Case = self.checker.oracle.cases[case]
        self._live[request_id] = Live(case, self._version)
        self.engine.add_request(request_id, drawn.prompt, drawn.params(), priority=self._rng.choice([0, 0, 1, -2]))
        if self._rng.random() < 0.01:
            self._refuse(request_id)
        if self._rng.random() < 0.005:
            self._abort(request_id)

    def _refuse(self, request_id: str) -> None:
        """Requests that are invalid leave nothing behind."""
        too_long = [7] * MAX_MODEL_LEN
        bad: list[tuple[str, list[int], dict[str, Any]]] = [
            (request_id, [7], {}),
            ("refused", too_long, {}),
            ("refused", [7], {"structured_outputs": {"regex": "("}}),
            ("refused", [10**6], {}),
        ]
        name, prompt, fields = self._rng.choice(bad)
        try:
            self.engine.add_request(name, prompt, SamplingParams(**fields))
        except ValueError:
            self.events["refused"] += 1
        else:
            self.checker.wrong.append(f"{name} with {len(prompt)} tokens and {fields} was not refused")

    def _abort(self, request_id: str) -> None:
        self._live[request_id].may_abort = True
        self.engine.abort_request(request_id)

    def _intervene(self) -> None:
        """Between steps: an update of the weights, a sleep, a pause, or a cleared cache."""
        rng, engine = self._rng, self.engine
        kind = rng.choice(["update", "update", "update", "bad_update", "reset_prefix_cache", "sleep", "pause"])
        mode = rng.choice(["drain", "drain", "wait", "wait", "keep", "abort"])
        if kind == "update":
            self._update(mode)
        elif kind == "bad_update":
            shape = next(iter(self.checker.oracle.weights.changed(0, 1).items()))
            try:
                engine.reload_weights([(shape[0], shape[1].flatten()[1:])], mode="keep")
            except WeightError:
                pass
            else:
                self.checker.wrong.append("a tensor of another shape was accepted")
        elif kind == "sleep":
            self._lose_requests(mode)
            engine.sleep(level=rng.choice([1, 2]), mode={"drain": "wait", "wait": "keep"}.get(mode, mode))
            engine.wake_up()
        elif kind == "pause":
            self._lose_requests(mode)
            engine.run_held(engine.pause, mode)
            self._add()
            self._abort(rng.choice(list(self._live)))
            engine.resume()
        else:
            engine.reset_prefix_cache(reset_running_requests=mode == "wait", reset_connector=mode != "keep")
        self.events[kind] += 1

    def _lose_requests(self, mode: str) -> None:
        if mode == "abort":
            for live in self._live.values():
                live.may_abort = True

    def _update(self, mode: str) -> None:
        """To another set of weights, in one of the three ways."""
        weights, old = self.checker.oracle.weights, self._weights
        self._weights = self._rng.choice([number for number in range(len(weights.folders)) if number != old])
        self._version += self._rng.choice([1, 1, 5])
        self.checker.numbers.update(dict.fromkeys(range(max(self.checker.numbers) + 1, self._version), old))
        self.checker.numbers[self._version] = self._weights
        self._lose_requests(mode)
        if mode == "keep":
            for live in self._live.values():
                live.kept_version = live.kept_version or self._version
        how = self._rng.choice(["checkpoint", "tensors", "patches"])
        options: dict[str, Any] = {"mode": mode, "weight_version": self._version}
        if how == "checkpoint":
            version = self.engine.reload_weights(weights.folders[self._weights], **options)
        elif how == "tensors":
            version = self.engine.reload_weights(weights.changed(old, self._weights).items(), **options)
        else:
            version = self.engine.apply_sparse_weight_patches(weights.patches(old, self._weights), **options)
        if version != self._version:
            self.checker.wrong.append(f"an update to version {self._version} has returned {version}")
        self.events[f"update_{how}"] += 1
        self.events[f"update_mode_{mode}"] += 1

    def _end(self, output: RequestOutput) -> None:
        live = self._live.pop(output.request_id, None)
        if live is None:
            self.checker.wrong.append(f"{output.request_id} has ended again")
            return
        self.num_ended += 1
        self.checker.check(output.request_id, live, output, self._version)

    def check_idle(self) -> None:
        """Nothing of the requests is left in the engine. Raises RuntimeError or AssertionError."""
        engine = self.engine
        while engine.has_transfers():
            engine.step()
        engine.report_finished()
        scheduler = engine.core.scheduler
        scheduler.check_idle()
        engine.check_integrity()
        states = [Counter(pool.state(block) for block in range(pool.num_blocks)) for pool in scheduler.pools.all]
        assert scheduler.pools.num_used == 0 and all(counts.keys() == {"FREE"} for counts in states), states
        assert not scheduler.requests and not scheduler.running and not engine.output_processor.num_unfinished
        engine.stats_collector.clear_samples()  # its windows grow for 100,000 samples


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """Without the folders of other engines, and with those that are elsewhere in shared memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(tempfile, "tempdir", folder),
        mock.patch.object(kept_weights, "_MEMORY", Path(folder)),
    ):
        yield Path(folder)


def slope(samples: list[tuple[int, int]]) -> float:
    """The median of the slopes between all pairs of (x, y), which outliers do not move (Theil, 1950; Sen, 1968)."""
    pairs = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(samples, 2) if a[0] != b[0]]
    return statistics.median(pairs) if pairs else 0.0


def memory_report(samples: list[tuple[int, int]]) -> dict[str, Any]:
    """Of (requests, bytes): the course, and the slope after the warm-up."""
    late = samples[int(WARM_UP * len(samples)) :]
    every = max(1, len(samples) // 20)
    return {
        "rss_mib": [round(rss / 2**20, 1) for _, rss in samples[::every]],
        "slope_bytes_per_request": round(slope(late), 2),
        "slope_requests": late[-1][0] - late[0][0],
    }


@contextmanager
def counted_evictions(counts: Counter[int]) -> Iterator[None]:
    """Count cached blocks and snapshots that are given up for others, by the groups of layers."""
    unpublish = BlockPool._unpublish

    def counting(pool: BlockPool, block: int) -> None:
        counts[pool.group] += 1
        unpublish(pool, block)

    with mock.patch.object(BlockPool, "_unpublish", counting):
        yield


def soak(
    num_requests: int,
    *,
    model: Path | None = None,
    num_reports: int = 20,
    num_live: int = 24,
    num_cases: int = 200,
    num_blocks: int | None = None,
    num_weights: int = 4,
    seed: int = 0,
    mean_steps: int = 1500,
    event_share: float = 0.004,
    load_failures: float = 0.05,
    kills: bool = False,
    max_slope: float = MAX_SLOPE,
    max_seconds: float = math.inf,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Run a soak, and return its report. ``settings``: of the engine. Raises AssertionError if anything is wrong.

    The slope of memory is compared with ``max_slope`` in a soak of 100,000 requests or more. After ``max_seconds`` it
    ends with the requests that it has.
    """
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
        "max_num_seqs": 2 * num_live // 3,
        "max_num_batched_tokens": 4 * num_live + 32,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 8,
        "num_gpu_blocks_override": num_blocks or max(36, num_live),  # too few: requests are preempted
        "scheduling_policy": "priority",
        "enable_sleep_mode": True,
        "on_error": "restart",
        "max_restarts": 10**9,
        "kv_transfer_config": connector,
    }
    resource_tracker.ensure_running()  # of multiprocessing: it stays
    begin = time.perf_counter()
    evicted: Counter[int] = Counter()
    with own_temporary_folder() as folder, counted_evictions(evicted):
        weights = WeightSets(model or embedded_model_path(), folder, num_weights)
        cases = make_cases(num_cases, seed)
        Oracle(weights, cases).shutdown()  # libraries have their threads now
        before = Resources.now()
        oracle = Oracle(weights, cases)
        oracle_s = time.perf_counter() - begin
        checker = Checker(oracle)
        config = EngineConfig(model=str(weights.folders[0]), **{**defaults, **settings})
        begin = time.perf_counter()
        engine = LLMEngine.from_config(config)
        engine.watch_holds(lambda is_held: setattr(faults, "is_held", is_held))
        load = Soak(engine, checker, seed=seed, num_live=num_live, event_share=event_share)
        samples: list[tuple[int, int]] = []
        for report in range(num_reports):
            load.run(num_requests * (report + 1) // num_reports - num_requests * report // num_reports)
            load.check_idle()
            samples.append((load.num_ended, Resources.now().rss))
            if verbose and (report + 1) % max(1, num_reports // 20) == 0:
                line = f"{load.num_ended} requests, {time.perf_counter() - begin:.0f} s, {samples[-1][1] >> 20} MiB"
                print(f"{line}, {len(checker.wrong)} wrong, {dict(load.events)}", file=sys.stderr, flush=True)
            assert not checker.wrong, checker.wrong[:5]
            if time.perf_counter() - begin > max_seconds:
                break
        stats, groups = engine.stats(), engine.core.scheduler.config.groups
        engine.shutdown()
        oracle.shutdown()
        distinct, replays, ties = oracle.num_distinct, oracle.num_replays, oracle.num_ties
        del engine, load.engine, checker.oracle, oracle
        left_over = Resources.now().left_over(before)
    drafts = stats.drafts
    result = {
        "requests": load.num_ended,
        "seconds": round(time.perf_counter() - begin, 1),
        "oracle_seconds": round(oracle_s, 1),
        "cases": num_cases,
        "weights": num_weights,
        "cases_that_differ_with_each": distinct,
        "steps": stats.num_steps,
        "ends": dict(checker.reasons),
        **checker.counts,
        "replays": replays,
        "ties": ties,
        "restarts": stats.num_restarts,
        "preemptions": stats.scheduler.num_preemptions,
        "evicted_blocks": sum(evicted[index] for index, group in enumerate(groups) if not group.is_state),
        "evicted_snapshots": sum(evicted[index] for index, group in enumerate(groups) if group.is_state),
        "prompt_tokens_from_cache": stats.scheduler.prefix_cache_hits,
        "drafted": drafts.num_drafted if drafts else 0,
        "accepted_drafts": drafts.num_accepted if drafts else 0,
        "loads": stats.transfers.loads_started,
        "failed_loads": stats.transfers.loads_failed,
        **load.events,
        **memory_report(samples),
        "left_over": {kind: dict(counts) for kind, counts in left_over.items()},
    }
    assert result["requests"] == load.num_added, result
    assert not left_over, result
    assert ties <= ties_allowed(checker.counts["tokens"]), result
    assert load.num_ended < 100_000 or result["slope_bytes_per_request"] <= max_slope, result
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so many, with fewer requests")
    parser.add_argument("--reports", type=int, default=100, help="how often the engine is left idle, and checked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runner", choices=("v1", "v2"), default="v2")
    parser.add_argument("--overlap", action="store_true", help="overlapped scheduling")
    parser.add_argument("--drafts", choices=tuple(DRAFTERS), default="ngram")
    parser.add_argument("--steps-between-errors", type=int, default=1500)
    parser.add_argument("--event-share", type=float, default=0.004, help="steps with an update, a sleep or the like")
    parser.add_argument(
        "--processes", type=int, default=0, help="ranks of a pipeline, which are killed; 0: no processes"
    )
    parser.add_argument("--live", type=int, default=48, help="requests at a time")
    parser.add_argument("--cases", type=int, default=400, help="prompts with parameters, of which requests are drawn")
    parser.add_argument("--blocks", type=int, help="KV blocks, or slabs of several groups of layers")
    parser.add_argument("--snapshots", type=int, help="recurrent states in the prefix cache at most")
    parser.add_argument("--http", action="store_true", help="over HTTP, without faults of workers")
    parser.add_argument("--model", type=Path, help="a folder; default: the embedded model")
    arguments = parser.parse_args()
    logging.getLogger("fleetfoot").setLevel(logging.CRITICAL + 1)
    torch.set_num_threads(1)  # on tensors this small, threads do nothing but wait for each other
    if arguments.http:
        from benchmarks.soak_http import http_soak

        report = http_soak(
            arguments.requests,
            model=arguments.model,
            num_reports=min(arguments.reports, max(5, arguments.requests // 100)),
            num_live=arguments.live,
            num_cases=arguments.cases,
            seed=arguments.seed,
            drafts=DRAFTERS[arguments.drafts],
            runner=arguments.runner,
            verbose=True,
        )
        print(json.dumps(report, indent=2))
        return
    settings: dict[str, Any] = {"model_runner": arguments.runner, "speculative_config": DRAFTERS[arguments.drafts]}
    if arguments.overlap:
        settings["async_scheduling"] = True
    if arguments.snapshots is not None:
        settings["max_state_snapshots"] = arguments.snapshots
    if arguments.processes:
        settings |= {"distributed_executor_backend": "mp", "pipeline_parallel_size": arguments.processes}
    report = soak(
        arguments.requests,
        model=arguments.model,
        num_reports=arguments.reports,
        num_live=arguments.live,
        num_cases=arguments.cases,
        num_blocks=arguments.blocks,
        seed=arguments.seed,
        mean_steps=arguments.steps_between_errors,
        event_share=arguments.event_share,
        kills=bool(arguments.processes),
        max_seconds=arguments.seconds,
        verbose=True,
        **settings,
    )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.soak import main as soak_main

    soak_main()  # of the module that worker processes and the connector's setting name
