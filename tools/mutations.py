"""Mutations of the contract of steps (`fleetfoot.runner.step_barrier`) and of the promise of the same tokens, each of
which a test must catch.

python tools/mutations.py [PART OF A NAME]   applies each to a copy of the source, and runs the test that is to fail
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 90
"""A test that waits longer has caught the mutation too: a rank waits for one that does not come."""


class Mutation(NamedTuple):
    """A change of the source."""

    name: str
    file: str
    """In `src/fleetfoot`."""
    old: str
    new: str
    test: str
    """Arguments of pytest."""


CALL = "            self.barrier.step(step)\n"
TABLE = "tests/engine/test_step_barrier.py -k test_each_rank"
LOAD = "tests/distributed/test_experts_of_ranks.py -k test_the_load"
MOVES = "tests/distributed/test_experts_of_ranks.py -k test_balanced_experts[{}]"
DATA = "tests/distributed/test_data_ranks.py -k {}"
RANKS = "tests/distributed/test_steps_of_ranks.py -k {}"
MATRIX = "tests/engine/test_matrix.py -k 'test_tokens and {}'"
SCHEDULER = (
    "tests/unit/test_scheduler.py tests/unit/test_scheduler_transfers.py tests/unit/test_scheduler_properties.py"
)
MUTATIONS = (
    Mutation(
        "stages that are not last",
        "runner/base.py",
        CALL,
        f"            if self._pipeline.is_last_rank:\n    {CALL}",
        TABLE,
    ),
    Mutation(
        "idle steps",
        "runner/base.py",
        CALL,
        f"            if step.rows or step.agreement.num_tokens:\n    {CALL}",
        TABLE,
    ),
    Mutation(
        "steps of padding",
        "runner/base.py",
        CALL,
        f"            if step.rows or not step.agreement.num_tokens:\n    {CALL}",
        TABLE,
    ),
    Mutation(
        "steps of prompts alone",
        "runner/base.py",
        CALL,
        f"            if not step.rows or step.num_sampled:\n    {CALL}",
        TABLE,
    ),
    Mutation("twice in a step", "runner/base.py", CALL, 2 * CALL, TABLE),
    Mutation(
        "before the connector",
        "runner/base.py",
        "        try:\n            if output is None:\n",
        f"        try:\n{CALL}            if output is None:\n",
        TABLE,
    ),
    Mutation(
        "steps of the warm-up",
        "runner/base.py",
        "            self._sample(None).get()\n        self.barrier.step(step)\n",
        "            self._sample(None).get()\n",
        TABLE,
    ),
    Mutation(
        "a rank goes on after an error",
        "runner/base.py",
        "        self.has_failed, self._step = True, None\n",
        "        self._step = None\n",
        "tests/engine/test_step_barrier.py -k whose_barrier_raises",
    ),
    Mutation(
        "load of the warm-up",
        "eplb/balancer.py",
        "step.is_idle or isinstance(step, WarmUpOutput)",
        "step.is_idle",
        LOAD,
    ),
    Mutation(
        "load of padding",
        "eplb/balancer.py",
        "        for place, (new, old) in enumerate(",
        "        if step.agreement.num_tokens and step.is_idle:\n"
        "            counted = 1, 1\n"
        "        for place, (new, old) in enumerate(",
        LOAD,
    ),
    Mutation(
        "idle steps of the balancing",
        "eplb/balancer.py",
        "        self.num_steps += 1\n",
        "        if scheduler_output.is_idle:\n            return\n        self.num_steps += 1\n",
        MOVES.format("data"),
    ),
    Mutation(
        "load of one replica",
        "eplb/balancer.py",
        "        dist.all_reduce(load, group=self._group.on_host)  # of the tokens of all replicas\n",
        "",
        MOVES.format("data"),
    ),
    Mutation(
        "load of all replicas on each",
        "layers/experts.py",
        "self.placement, None)  # all ranks' tokens",
        "self.placement, counted)",
        LOAD,
    ),
    Mutation(
        "a mover that fails in silence",
        "eplb/balancer.py",
        "                self._failure = error\n",
        "                pass\n",
        "tests/distributed/test_experts_of_ranks.py -k test_the_first_cause",
    ),
    Mutation(
        "no padding beside others",
        "scheduler/ranks.py",
        "            for part in parts:\n                part.agreement",
        "            for part in computing:\n                part.agreement",
        DATA.format("[v1]"),
    ),
    Mutation(
        "rows of a rank's own, V1",
        "runner/v1/runner.py",
        "rows_of_ranks=scheduler_output.agreement.num_tokens",
        "rows_of_ranks=0",
        DATA.format("[v1]"),
    ),
    Mutation(
        "rows of a rank's own, V2",
        "runner/v2/runner.py",
        "rows_of_ranks = scheduler_output.agreement.num_tokens",
        "rows_of_ranks = 0",
        DATA.format("[v2]"),
    ),
    Mutation(
        "the last layer without rows",
        "runner/v2/device_step.py",
        "        reads_all = reads_all or bool(rows_of_ranks and not batch.shape.num_sampled)\n",
        "",
        DATA.format("[v2]"),
    ),
    Mutation("graphs of different kinds", "runner/graphs.py", "len(kinds) > 1 or ", "", DATA.format("test_agreements")),
    Mutation(
        "padding is eager beside graphs",
        "runner/v2/runner.py",
        "        if shape is None or graph is None:\n            return self._padding",
        "        if True:\n            return self._padding",
        DATA.format("[graphs]"),
    ),
    Mutation(
        "idle ranks without connectors",
        "scheduler/ranks.py",
        "part or (rank.schedule_idle() if has_connector else ",
        "part or (",
        RANKS.format("'test_all_ranks and V2 and data'"),
    ),
    Mutation(
        "a rank's results at another",
        "executor/multiprocess.py",
        "self._data_ranks[reply.rank // len(self._data_ranks[0].all)]",
        "self._data_ranks[0]",
        DATA.format("[v1]"),
    ),
    Mutation(
        "steps while nobody has work",
        "scheduler/ranks.py",
        "        if all(part is None for part in found):\n            return None\n",
        "",
        DATA.format("[v1]"),
    ),
    Mutation(
        "no idle step for the last finished ids",
        "engine/core.py",
        "        if not self.has_work and self.scheduler.has_unreported_ids:\n            self.step()\n",
        "",
        "tests/engine/test_engine_transfers.py",
    ),
    Mutation(
        "KV of earlier weights is published",
        "scheduler/scheduler.py",
        "            if request.block_ids:  # of a load",
        "            if not request:  # of a load",
        SCHEDULER,
    ),
    Mutation(
        "blocks that steps in flight held are missing",
        "scheduler/scheduler.py",
        "                self._num_held -= self.blocks.num_owned(request)\n",
        "                pass\n",
        f"{SCHEDULER} tests/unit/test_scheduler_properties.py",
    ),
    Mutation(
        "a preempted request loses its last token",
        "scheduler/scheduler.py",
        "        if request.status is RequestStatus.PREEMPTED and (",
        "        if not request and (",
        f"{SCHEDULER} tests/unit/test_scheduler_properties.py",
    ),
    Mutation(
        "a request is forgotten whose first chunk has no room",
        "scheduler/scheduler.py",
        "[*self._begun.values()] if requests else []",
        "[new for new in self._begun.values() if new.row in [request.row for request in requests]]",
        MATRIX.format("gemma3 and tight"),
    ),
    Mutation(
        "a block is found by its own tokens alone",
        "scheduler/kv_blocks.py",
        "parent = hashes[-1] if hashes else root_hash(",
        "parent = root_hash(",
        f"{SCHEDULER} tests/unit/test_block_pool.py",
    ),
    Mutation(
        "windows are freed a block early",
        "scheduler/kv_blocks.py",
        "group.first_block(position, self.block_size)",
        "group.first_block(position + self.block_size, self.block_size)",
        MATRIX.format("(mistral or gemma3)"),
    ),
    Mutation(
        "blocks of rejected drafts are cached",
        "scheduler/kv_blocks.py",
        "final = min(request.num_computed, request.num_tokens, request.max_total_tokens - 1)",
        "final = min(request.num_computed, request.max_total_tokens - 1)",
        MATRIX.format("story and (ngram or eagle)"),
    ),
    Mutation(
        "wrong drafts are accepted",
        "sampling/verification.py",
        "proposed[accepted] == tokens[accepted] and ",
        "",
        MATRIX.format("story and v1"),
    ),
    Mutation(
        "a snapshot of the token after its prefix",
        "scheduler/states.py",
        "states.slots[(end - 1) % len(states.slots)]",
        "states.slots[end % len(states.slots)]",
        MATRIX.format("next"),
    ),
)


def run(mutation: Mutation) -> tuple[str, float]:
    """What the test says of it, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(folder) / "src" / "fleetfoot" / mutation.file
        text = path.read_text()
        if text.count(mutation.old) != 1:
            return f"STALE: {text.count(mutation.old)} places", 0.0
        path.write_text(text.replace(mutation.old, mutation.new))
        test, _, selected = mutation.test.partition(" -k ")
        arguments = [*test.split(), *(["-k", selected.strip("'")] if selected else [])]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src:{ROOT}"}
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            found = {0: "SURVIVES", 1: "caught"}.get(process.wait(TIMEOUT_S), "ERROR")
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            found = "caught: a rank waits"
        return found, time.perf_counter() - begin


def main() -> int:
    """0 if all are caught."""
    selected = [each for each in MUTATIONS if all(part in each.name for part in sys.argv[1:2])]
    failed = 0
    for mutation in selected:
        found, seconds = run(mutation)
        failed += not found.startswith("caught")
        print(f"{found:22} {seconds:5.0f} s  {mutation.name} ({mutation.file})", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
