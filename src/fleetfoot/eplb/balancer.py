"""Balances experts over ranks by their load (vLLM's and DeepSeek's EPLB).

Steps count on the device how often each expert is chosen. Every ``step_interval`` steps a round begins: a thread of
each rank, the mover, places the experts of each layer anew and exchanges their matrices with the other ranks' movers,
beside the steps, into buffers. Then the layer is switched between two steps: matrices are copied from the buffers, and
the maps that the router's choice goes through are replaced, in the order of the device's work.

All ranks switch a layer after the same step, and no step waits for a collective operation. Movers agree on it: each
promises that its rank does not go beyond a step a little ahead, and the largest of these is taken. A rank that gets
there before it knows the result waits for its mover.

Weights may change while they are moved. Movers also compare how often they have changed; if a rank's have since, a
layer is not switched, and staged again. While weights sleep, movers do not read them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fleetfoot.config.eplb import EPLBConfig
from fleetfoot.config.sharding import ExpertSplit
from fleetfoot.distributed.groups import ExpertGroup
from fleetfoot.distributed.placement import balancedness, rank_loads, rebalanced
from fleetfoot.eplb.exchange import Move, make_exchange, moves_between
from fleetfoot.layers.experts import Experts
from fleetfoot.records.step import BalanceReport, SchedulerOutput, WarmUpOutput
from fleetfoot.runner.step_barrier import StepBarrier
from fleetfoot.weights.store import WeightStore

logger = logging.getLogger(__name__)

_AHEAD = 3
"""Steps that a rank may take while movers agree on one."""


class MoveError(RuntimeError):
    """Experts could not be moved, so that ranks may differ in where they are."""


class _OverError(Exception):
    """This rank takes no further steps."""


@dataclass(frozen=True, slots=True)
class _Switch:
    """What all ranks do after the same step."""

    step: int
    """The number of calls of `Balancer.step`."""
    layer: int = -1
    """-1: the round ends."""
    placement: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()
    """To slots of this rank."""
    version: int | None = None
    """`WeightStore.num_changes` on all ranks when it was staged; None: they differed."""


class Balancer(StepBarrier):
    """Implements `StepBarrier`. ``num_nodes``: machines that the group's ranks are on; ``ranks_per_replica``: ranks of
    the group that count the same tokens."""

    def __init__(
        self,
        settings: EPLBConfig,
        split: ExpertSplit,
        group: ExpertGroup,
        num_nodes: int = 1,
        ranks_per_replica: int = 1,
    ) -> None:
        self._settings, self._split, self._group, self._num_nodes = settings, split, group, num_nodes
        self._ranks_per_replica = ranks_per_replica
        self.num_steps = 0
        """Calls of `step`."""
        self._since = settings.step_interval - settings.step_interval // 4
        """Steps since a round has begun, as if one had before the start."""
        self._is_moving = False
        self._layers: dict[int, Experts] = {}
        self.report = self._taken = BalanceReport()
        num_windows = max(1, -(-settings.window_size // settings.step_interval))
        self._past: deque[torch.Tensor] = deque(maxlen=num_windows)
        self._rounds: SimpleQueue[tuple[torch.Tensor, Any]] = SimpleQueue()
        # between the steps and the mover
        self._changed = Condition()
        self._hold_at: int | None = None
        self._due: _Switch | None = None
        self._failure: BaseException | None = None
        self._is_over = False
        self._switched, self._was_applied = Event(), False
        self._reading, self._is_suspended = Lock(), False

    def attach(self, model: nn.Module, weights: WeightStore) -> None:
        """Balance the experts of a model with loaded weights. A collective call."""
        found = ((name, module) for name, module in model.named_modules() if isinstance(module, Experts))
        self._layers = {int(name.split(".")[-3]): module for name, module in found}
        self._weights, sizes = weights, [layer.spec.num_experts for layer in self._layers.values()]
        if not self._layers:  # a stage of a pipeline without experts
            return
        device = next(iter(self._layers.values())).weight.stacks()[0].device
        self._load = torch.zeros(len(sizes), max(sizes), dtype=torch.int32, device=device)
        self._counted = torch.zeros(2, dtype=torch.int32, device=device)
        self._counted_now = 0, 0
        for index, layer in enumerate(self._layers.values()):
            layer.count_load(self._load[index, : sizes[index]], (self._counted[:1], self._counted[1:]))
        stacks = [layer.weight.stacks() for layer in self._layers.values()]
        self._slots = [self._split.slots(rank, sizes[0]) for rank in range(self._group.size)]
        self._exchange = make_exchange(self._group, self._slots, stacks)
        Thread(target=self._move, args=(device,), name="fleetfoot-mover", daemon=True).start()

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        step, counted = scheduler_output, (0, 0)
        if not self._layers:
            return
        if not (step.is_idle or isinstance(step, WarmUpOutput)):
            counted = step.total_num_scheduled_tokens, step.num_sampled + step.num_decodes * step.num_drafts
        for place, (new, old) in enumerate(zip(counted, self._counted_now, strict=True)):
            if new != old:
                self._counted[place].fill_(new)
        self._counted_now = counted

    def step(self, scheduler_output: SchedulerOutput) -> None:
        self.num_steps += 1
        self._since += 1
        if not self._layers:
            return
        self._switch()
        interval = self._settings.step_interval
        if self._since == interval - self._settings.window_size:
            self._load.zero_()
        is_warm_up = isinstance(scheduler_output, WarmUpOutput)  # graphs are captured next, beside no other work
        if self._since >= interval and not self._is_moving and not is_warm_up:
            self._since, self._is_moving = 0, True
            self._rounds.put(self._take_load())

    def _take_load(self) -> tuple[torch.Tensor, Any]:
        """The load on the host once the event has happened, and none on the device."""
        on_device = self._load.device.type == "cuda"
        load = torch.empty(self._load.shape, dtype=torch.int32, pin_memory=on_device)
        load.copy_(self._load, non_blocking=True)
        self._load.zero_()
        event = torch.cuda.Event() if on_device else None
        if event is not None:
            event.record()
        return load, event

    def _switch(self) -> None:
        """Do what is due after this step. Raises MoveError: the mover has failed."""
        with self._changed:
            while self._hold_at is not None and self.num_steps >= self._hold_at and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise MoveError(f"the balancing of experts has failed: {self._failure}") from self._failure
            due = self._due
            if due is None or self.num_steps < due.step or self._is_suspended:
                return
            self._due = None
        if due.layer < 0:
            self._is_moving = False
            return
        layer = self._layers[due.layer]
        self._was_applied = due.version == self._weights.num_changes
        if self._was_applied:
            self._exchange.write(layer.weight.stacks(), [move.target for move in due.moves])
            layer.place(due.placement)
            self._weights.outdate()
        self._event = None
        if self._load.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()
        self._switched.set()

    def take_report(self) -> BalanceReport | None:
        report, taken = self.report, self._taken
        self._taken = report
        return None if report is taken else report

    def abandon(self) -> None:
        self._is_over = True

    def suspend(self) -> None:
        self._reading.acquire()
        self._is_suspended = True

    def resume(self) -> None:
        if self._is_suspended:
            self._is_suspended = False
            self._reading.release()

    # --- the mover ----------------------------------------------------------------------------------------------------

    def _move(self, device: torch.device) -> None:
        """In a thread: all rounds."""
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with torch.no_grad():
                while True:
                    load, event = self._rounds.get()
                    with _frequent_switches():
                        self._run_round(load, event)
        except _OverError:
            pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _run_round(self, load: torch.Tensor, event: Any) -> None:
        if event is not None:
            event.synchronize()
        began = time.perf_counter()
        self._past.append(load)
        load = torch.stack(tuple(self._past)).sum(dim=0)  # [layers, experts] int64
        self._enter()
        dist.all_reduce(load, group=self._group.on_host)  # of the tokens of all replicas
        load //= self._ranks_per_replica
        before: list[float] = []
        after: list[float] = []
        of_ranks = [0.0] * len(self._slots)
        for loads, (number, layer) in zip(load.tolist(), self._layers.items(), strict=True):
            spec, old = layer.spec, layer.experts
            loads = loads[: spec.num_experts]
            groups = {"num_groups": spec.router.num_groups, "num_nodes": self._num_nodes}
            new = rebalanced(loads, old, self._slots, **groups)
            now, then = (rank_loads(loads, placement, self._slots) for placement in (old, new))
            before.append(balancedness(now))
            after.append(balancedness(then))
            of_ranks = [so_far + one for so_far, one in zip(of_ranks, now, strict=True)]
            if new != old:
                self._move_layer(number, layer, new)
        count = len(self._layers)
        report = self.report = replace(
            self.report,
            num_rounds=self.report.num_rounds + 1,
            balancedness=sum(before) / count,
            least=min(before),
            expected=sum(after) / count,
            seconds=self.report.seconds + time.perf_counter() - began,
            rank_loads=tuple(one / (sum(of_ranks) or 1.0) for one in of_ranks),
        )
        is_logged = self._settings.log_balancedness and self._group.is_first_rank
        if is_logged and report.num_rounds % self._settings.log_balancedness_interval == 0:
            logger.info(
                "balancedness of experts over %d ranks: %.3f, and %.3f expected; %d moved so far",
                self._group.size, report.balancedness, report.expected, report.num_moved,
            )  # fmt: skip
        if self._settings.save and self._group.is_first_rank:
            save_placement(Path(self._settings.save), load, {n: each.experts for n, each in self._layers.items()})
        self._due_after_agreement()

    def _move_layer(self, number: int, layer: Experts, placement: tuple[int, ...]) -> None:
        """Exchange what changes and switch, again if weights have been updated meanwhile."""
        moves = moves_between(layer.experts, placement, self._slots)
        own = tuple(move for move in moves if move.target_rank == self._group.rank)
        while True:
            self._enter()
            dist.barrier(group=self._group.on_host)  # all buffers have been read
            version = self._weights.num_changes
            self._exchange.stage(layer.weight.stacks(), moves, self._reading_weights())
            self._switched.clear()
            self._due_after_agreement(number, placement, own, version)
            self._switched.wait()
            if self._event is not None:
                self._event.synchronize()
            if self._was_applied:
                self.report = replace(self.report, num_moved=self.report.num_moved + len(moves))
                return

    def _due_after_agreement(
        self,
        layer: int = -1,
        placement: tuple[int, ...] = (),
        moves: tuple[Move, ...] = (),
        version: int = 0,
    ) -> None:
        """Agree with the other movers on the step after which ranks switch."""
        with self._changed:
            self._hold_at = self.num_steps + _AHEAD
            found = torch.tensor([self._hold_at, version, -version])
        self._enter()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group.on_host)
        step, newest, negative_oldest = found.tolist()
        with self._changed:
            same = version if newest == -negative_oldest else None
            self._due, self._hold_at = _Switch(step, layer, placement, moves, same), None
            self._changed.notify_all()

    def _enter(self) -> None:
        """Before a collective operation."""
        if self._is_over:
            raise _OverError

    @contextmanager
    def _reading_weights(self) -> Iterator[None]:
        with self._reading:
            yield


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Let threads take the interpreter after 0.1 ms in place of 5. What launches the kernels of a prompt gives it up in
    each operation, and would get it back from the mover that late."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, 1e-4))
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def save_placement(folder: Path, load: torch.Tensor, placements: dict[int, Sequence[int]]) -> None:
    """Write the load and the placement of some layers, for `fleetfoot.distributed.placement.read_placements`."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = {
        str(number): {"load": loads[: max(experts) + 1], "experts": list(experts)}
        for loads, (number, experts) in zip(load.tolist(), placements.items(), strict=True)
    }
    path = folder / f"layers-{min(placements)}.json"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"layers": layers}))
    partial.replace(path)
