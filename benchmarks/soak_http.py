"""The soak of `benchmarks.soak` over HTTP: a server process on loopback, and clients in this process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from benchmarks.soak import MAX_SLOPE, WARM_UP, Checker, Live, Resources, memory_report, own_temporary_folder
from benchmarks.soak_oracle import MAX_MODEL_LEN, Case, Entry, Oracle, WeightSets, make_cases, ties_allowed

from fleetfoot.assets import embedded_model_path
from fleetfoot.outputs import CompletionOutput, Logprob, RequestOutput

_ADMIN_KEY = "the key of a soak"


class Server:
    """``fleetfoot serve`` and all of its processes. Its temporary folder is ``folder``."""

    def __init__(self, model: Path, folder: Path, flags: Sequence[str]) -> None:
        words = [sys.executable, "-m", "fleetfoot", "serve", "--port", "0", "--served-model-name", "m"]
        words += ["--model", str(model), "--enable-admin-routes", "--admin-key", _ADMIN_KEY, *flags]
        environment = {**os.environ, "TMPDIR": str(folder)}
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
        self._log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.append(line)
            if match := re.search(r'listening on ([^\s"]+)', line):
                self.url = match[1]
                break
        else:
            raise RuntimeError("the server has not started:\n" + "".join(self._log))
        self._reader = threading.Thread(target=self._log.extend, args=(self.process.stderr,))
        self._reader.start()

    @property
    def pids(self) -> list[int]:
        """Of the server, of its children, and theirs."""
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, task.read_text().split())
        return found

    def resources(self) -> Resources:
        """Of all processes together."""
        parts = [Resources.now(pid) for pid in self.pids]
        kinds = ("descriptors", "threads", "children", "shared")
        sums = {kind: sum((getattr(part, kind) for part in parts), Counter[str]()) for kind in kinds}
        return Resources(sum(part.rss for part in parts), **sums)

    def stop(self) -> list[int]:
        """End it by SIGTERM. Returns its processes that are still there."""
        pids = self.pids
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        assert code == 0, (code, self._log[-20:])
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@contextmanager
def running_server(model: Path, folder: Path, flags: Sequence[str]) -> Iterator[Server]:
    server = Server(model, folder, flags)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()


class HttpSoak:
    """Clients of a server, and one that changes it meanwhile."""

    def __init__(self, checker: Checker, url: str, *, seed: int, num_live: int, event_every: int) -> None:
        self.checker = checker
        self.events: Counter[str] = Counter()
        self.num_added = self.num_ended = 0
        self._rng = random.Random(seed)
        self._num_live, self._event_every = num_live, event_every
        self._url = url
        self._live: dict[int, Live] = {}
        self._version = self._weights = 0  # of updates that have begun
        self._served = 0  # the version of the last update that has ended
        self._has_files = True  # the weights in use are those of files
        self._changing = asyncio.Lock()
        self._aborts = False  # a call that aborts requests is under way, and may find those that come meanwhile
        self._ended: list[tuple[str, Live, Answer, int]] = []  # with the version of the weights then

    async def run(self, num_requests: int) -> None:
        """Run so many more requests to their ends."""
        last = self.num_added + num_requests
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._num_live)
        async with httpx.AsyncClient(base_url=self._url, timeout=600, limits=limits) as client:

            async def work() -> None:
                while self.num_added < last:
                    self.num_added += 1
                    await self._request(client, self.num_added)
                    if self.num_ended % self._event_every == 0 and not self._changing.locked():
                        async with self._changing:
                            await self._intervene(client)

            await asyncio.gather(*(work() for _ in range(self._num_live)))
        for ended in self._ended:  # without connections, which would wait for what the oracle computes
            self._check(*ended)
        self._ended.clear()

    async def _request(self, client: httpx.AsyncClient, number: int) -> None:
        case_number = self._rng.randrange(len(self.checker.oracle.cases))
        case: Case = self.checker.oracle.cases[case_number]
        live = self._live[number] = Live(case_number, self._served, may_abort=self._aborts)
        body = {"model": "m", "prompt": case.prompt, **case.fields, "return_token_ids": True}
        body |= {"return_tokens_as_token_ids": True, "priority": self._rng.choice([0, 0, 1, -2])}
        if self._rng.random() < 0.02:
            await self._refuse(client, body)
        answer = Answer(case)
        if self._rng.random() < 0.5:
            response = await client.post("/v1/completions", json=body)
            if response.status_code == 200:
                answer.add(response.json())
            else:
                answer.error = response.text
        else:
            await self._stream(client, body, answer)
        del self._live[number]
        self.num_ended += 1
        self._ended.append((f"request {number}", live, answer, self._version))

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
        """Take the events of a stream; a few are left by the client."""
        leaves_after = self._rng.randrange(4) if self._rng.random() < 0.05 else -1
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                answer.error = (await response.aread()).decode()
                return
            num_events = 0
            async for line in response.aiter_lines():
                if num_events == leaves_after:
                    answer.was_left = True
                    self.events["left"] += 1
                    return
                if line.startswith("data: {"):
                    answer.add(json.loads(line[6:]))
                    num_events += 1

    async def _refuse(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        bad: dict[str, Any] = self._rng.choice(
            [{"prompt": [7] * MAX_MODEL_LEN}, {"temperature": -1}, {"structured_outputs": {"regex": "("}}, {"n": 0}]
        )
        response = await client.post("/v1/completions", json={**body, **bad})
        self.events["refused"] += 1
        if response.status_code != 400:
            self.checker.wrong.append(f"{bad}: {response.status_code} {response.text}")

    def _check(self, name: str, live: Live, answer: Answer, last_version: int) -> None:
        if answer.error is not None:
            self.checker.wrong.append(f"{name}, {answer.case}: {answer.error}")
            return
        oracle = self.checker.oracle
        numbers = sorted({self.checker.numbers[version] for version in range(live.first_version, last_version + 1)})
        for seen in answer.outputs():
            reason = "left" if answer.was_left and seen.finish_reason is None else str(seen.finish_reason)
            self.checker.reasons[reason] += 1
            self.checker.counts["tokens"] += len(seen.token_ids)
            if reason not in ("stop", "length", "left") and not (reason == "abort" and live.may_abort):
                self.checker.wrong.append(f"{name}: it has ended with {reason}")
            is_part = reason in ("left", "abort")
            self.checker.counts["compared_in_part" if is_part else "compared"] += 1
            count = max(1, len(seen.token_ids))
            candidates = [[number] * count for number in numbers]
            candidates += [
                [old] * place + [new] * (count - place)
                for place in range(1, count) for old in numbers for new in numbers if old != new
            ]  # fmt: skip
            problems = list[str]()
            for candidate in candidates:
                if (problem := oracle.problem(live.case, seen, candidate, is_part=is_part)) is None:
                    self.checker.counts["mixed"] += len(set(candidate)) > 1
                    break
                problems.append(problem)
            else:
                self.checker.wrong.append(f"{name}, output {seen.index} of {answer.case}: {problems[0]}")
        output = RequestOutput("", None, answer.case.prompt, answer.outputs(), True, answer.prompt_logprobs)
        if not answer.was_left and (problem := self.checker.prompt_problem(live, output, last_version)):
            self.checker.wrong.append(f"{name}, {answer.case}: {problem}")

    async def _intervene(self, client: httpx.AsyncClient) -> None:
        """An update of the weights, a sleep, a pause, or a cleared cache."""
        rng = self._rng
        kind = rng.choice(["update", "update", "update", "reset_prefix_cache", "sleep", "pause"])
        mode = rng.choice(["drain", "wait", "abort"])
        self._aborts = mode == "abort" and kind != "reset_prefix_cache"
        for live in self._live.values():
            live.may_abort |= self._aborts
        if kind == "update":
            await self._update(client, mode)
        elif kind == "sleep":
            level = rng.choice([1, 2]) if self._has_files else 1  # level 2 drops what is in no file
            await self._call(client, "/sleep", {"level": level, "mode": {"drain": "keep"}.get(mode, mode)})
            await self._call(client, "/wake_up", {})
        elif kind == "pause":
            await self._call(client, "/pause", {"mode": {"drain": "keep"}.get(mode, mode)})
            await self._call(client, "/resume", {})
        else:
            await self._call(client, "/reset_prefix_cache", {"reset_running_requests": mode == "wait"})
        self._aborts = False
        self.events[kind] += 1

    async def _update(self, client: httpx.AsyncClient, mode: str) -> None:
        weights, old = self.checker.oracle.weights, self._weights
        self._weights = self._rng.choice([number for number in range(len(weights.folders)) if number != old])
        self.checker.numbers[self._version + 1] = self._weights
        self._version += 1
        if self._rng.random() < 0.5:
            update: dict[str, Any] = {"weights_path": str(weights.folders[self._weights])}
        else:
            update = {
                "patches": [
                    {**patch, "indices": patch["indices"].tolist(), "values": patch["values"].float().tolist()}
                    for patch in weights.patches(old, self._weights)
                ]
            }
        state = await self._call(client, "/update_weights", {**update, "mode": mode})
        if state["weight_version"] != self._version:
            self.checker.wrong.append(f"an update to version {self._version} has returned {state}")
        self._served, self._has_files = self._version, "weights_path" in update
        self.events[f"update_{next(iter(update))}"] += 1
        self.events[f"update_mode_{mode}"] += 1

    async def _call(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await client.post(path, json=body, headers={"Authorization": f"Bearer {_ADMIN_KEY}"})
        assert response.status_code == 200, (path, response.text)
        state: dict[str, Any] = response.json()
        return state


class Answer:
    """The body of a response, or the events of a stream."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.error: str | None = None
        self.was_left = False
        self.prompt_logprobs: list[Entry] | None = None
        self._outputs = [CompletionOutput(index, "", []) for index in range(case.fields.get("n", 1))]
        for output in self._outputs:
            output.logprobs = [] if "logprobs" in case.fields else None

    def outputs(self) -> list[CompletionOutput]:
        return self._outputs

    def add(self, body: dict[str, Any]) -> None:
        """Add a body, or an event."""
        if "error" in body:
            self.error = json.dumps(body)
            return
        for choice in body["choices"]:
            output = self._outputs[choice["index"]]
            output.text += choice["text"]
            output.token_ids = output.token_ids + choice.get("token_ids", [])
            output.finish_reason = choice["finish_reason"] or output.finish_reason
            output.stop_reason = choice.get("stop_reason") or output.stop_reason
            if output.logprobs is not None and choice["logprobs"] is not None:
                output.logprobs = output.logprobs + [_entry(top) for top in choice["logprobs"]["top_logprobs"]]
            if choice.get("prompt_logprobs") is not None:
                self.prompt_logprobs = [
                    entry and {int(token): Logprob(**values) for token, values in entry.items()}
                    for entry in choice["prompt_logprobs"]
                ]


def _entry(top: dict[str, float]) -> dict[int, Logprob]:
    """Of one position; names of tokens are ``token_id:N``. There are no ranks."""
    return {int(name.partition(":")[2]): Logprob(logprob) for name, logprob in top.items()}


def http_soak(
    num_requests: int,
    *,
    model: Path | None = None,
    num_reports: int = 20,
    num_live: int = 24,
    num_cases: int = 100,
    num_weights: int = 3,
    seed: int = 0,
    event_every: int = 40,
    max_slope: float = MAX_SLOPE,
    drafts: dict[str, Any] | None = None,
    runner: str = "v2",
    verbose: bool = False,
) -> dict[str, Any]:
    """Run a soak over HTTP, and return its report; as `benchmarks.soak.soak`."""
    flags = ["--device", "cpu", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--block-size", "8"]
    flags += ["--max-num-seqs", str(2 * num_live // 3), "--max-num-batched-tokens", str(4 * num_live + 32)]
    flags += ["--num-gpu-blocks-override", str(max(36, num_live)), "--scheduling-policy", "priority"]
    flags += ["--enable-sleep-mode", "--model-runner", runner, "--api-server-count", "2"]
    if drafts is not None:
        flags += ["--speculative-config", json.dumps(drafts)]
    with own_temporary_folder() as folder:
        weights = WeightSets(model or embedded_model_path(), folder, num_weights)
        oracle = Oracle(weights, make_cases(num_cases, seed))
        checker = Checker(oracle)
        (served := folder / "served").mkdir()
        begin = time.perf_counter()
        samples: list[tuple[int, int]] = []
        with running_server(weights.folders[0], served, flags) as server:
            load = HttpSoak(checker, server.url, seed=seed, num_live=num_live, event_every=event_every)
            for report in range(num_reports):
                asyncio.run(load.run(num_requests * (report + 1) // num_reports - load.num_added))
                now = server.resources()
                if report == int(WARM_UP * num_reports):  # thread pools have grown
                    before = now
                samples.append((load.num_ended, now.rss))
                if verbose:
                    line = f"{load.num_ended} requests, {time.perf_counter() - begin:.0f} s, {now.rss >> 20} MiB"
                    print(f"{line}, {len(checker.wrong)} wrong, {dict(load.events)}", file=sys.stderr, flush=True)
                assert not checker.wrong, checker.wrong[:5]
            left_over = now.left_over(before)
            metrics = httpx.get(f"{server.url}/metrics").text
            processes = server.stop()
        files = sorted(str(path.relative_to(served)) for path in served.rglob("*"))
        oracle.shutdown()
    found = re.findall(r"(?m)^\w+:num_preemptions(?:_total)?(?:\{[^}]*\})? (\S+)", metrics)
    result = {
        "requests": load.num_ended,
        "seconds": round(time.perf_counter() - begin, 1),
        "ends": dict(checker.reasons),
        **checker.counts,
        "cases_that_differ_with_each": oracle.num_distinct,
        "replays": oracle.num_replays,
        "ties": oracle.num_ties,
        "preemptions": sum(int(float(value)) for value in found),
        **load.events,
        **memory_report(samples),
        "left_over": {kind: dict(counts) for kind, counts in left_over.items()},
        "processes_left": processes,
        "files_left": files,
    }
    assert not left_over and not processes and not files, result
    assert oracle.num_ties <= ties_allowed(checker.counts["tokens"]), result
    assert load.num_ended < 100_000 or result["slope_bytes_per_request"] <= max_slope, result
    return result
