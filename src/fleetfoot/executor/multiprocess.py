"""Runs steps in worker processes, one for each rank, on one machine or several.

Steps are sent without waiting. `PendingOutput.get` waits for an output, and for anything that prevents it: a worker's
exception, the end of its process, the end of another machine. Then all processes are ended, and every call raises that
cause.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from fleetfoot.executor.messages import (
    EngineChannel,
    Failure,
    Ready,
    RpcResult,
    StepOutput,
    decode_reply,
    encode_call,
    encode_masks,
    encode_rpc,
)
from fleetfoot.executor.nodes import EngineNodes, check_devices
from fleetfoot.executor.processes import RendezvousDir, WorkerProcesses
from fleetfoot.executor.protocol import WorkerError
from fleetfoot.executor.values import decode_value
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.step import (
    KVConnectorOutput,
    ModelRunnerOutput,
    OutputOfRanks,
    PendingOutput,
    SchedulerOutput,
    TokenMasks,
    TransferFailure,
    without_token_ids,
)
from fleetfoot.structured.mask_space import MaskMemory

logger = logging.getLogger(__name__)

_NODE_WAIT_MS = 1000
"""How long to wait, after a worker has failed, for another machine to report the loss of one of its own."""
_SHUTDOWN = b""
"""The message that ends a worker."""


class MultiprocessExecutor:
    """Implements `fleetfoot.executor.protocol.Executor`. Not thread-safe. This machine must be the plan's first node.

    Raises what `fleetfoot.executor.build.start_executor` does, and WorkerError if a worker's process has ended during
    the start.
    """

    def __init__(self, plan: EnginePlan, masks: MaskMemory | None = None) -> None:
        config = plan.config
        self._failure: WorkerError | None = None
        self._is_shut_down = False
        self._step: SchedulerOutput | None = None
        self._num_steps = 0
        self._num_rpcs = 0
        self._rpc_results: dict[int, RpcResult] = {}  # of the last call, by rank
        self._ready: dict[int, Ready] = {}
        self._num_workers, stage = config.world_size, config.tensor_parallel_size
        self._data_ranks = [
            _DataRank(range(first, first + config.replica_size), stage, plan)
            for first in range(0, self._num_workers, config.replica_size)
        ]
        self._rendezvous, self._processes = self._open(plan)
        is_shared = masks is not None and masks.file.descriptor >= 0 and isinstance(self._rendezvous, RendezvousDir)
        self._masks = masks if is_shared else None
        # for programs that do not call shutdown; at exit another thread may still use the sockets
        weakref.finalize(self, _abandon, os.getpid(), self._processes, self._rendezvous)
        self._channel = EngineChannel(self._rendezvous.place, self._num_workers, self._rendezvous.worker_key)
        closing = weakref.finalize(self, self._channel.close)
        closing.atexit = False  # type: ignore[misc]  # it is a property
        try:
            self._rendezvous.gather(self._channel.addresses)
            self._processes.start(plan, self._channel.addresses, self._rendezvous.store, self._masks)
            self._poller = zmq.Poller()
            for source in (self._channel.replies, *self._processes.sentinels, *self._rendezvous.descriptors):
                self._poller.register(source, zmq.POLLIN)
            while len(self._ready) < self._num_workers:
                self._poll()
        except BaseException as error:
            self._close(str(error) or type(error).__name__)
            raise
        self.layout = self._ready[0].layout
        self.runner_name = self._ready[0].runner

    def _open(self, plan: EnginePlan) -> tuple[Any, Any]:
        """What workers find the engine by, and what starts them: an `EngineNodes` or what is like it, and
        `WorkerProcesses` or what is like them."""
        config = plan.config
        if config.node_rank != 0:
            raise ValueError(
                f"node_rank is {config.node_rank}: the engine starts on node 0, and this machine runs `fleetfoot "
                "worker` with the same settings"
            )
        check_devices(plan)
        return EngineNodes(plan) if config.nnodes > 1 else RendezvousDir(), WorkerProcesses()

    # --- steps ------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Take a step, which is sent when `sample_tokens` is called, or at once if its masks follow.

        Raises WorkerError if a worker has failed or ended; so do `sample_tokens` and its output.
        """
        self._check()
        self._step = scheduler_output
        if scheduler_output.structured:
            self._send_step(scheduler_output)

    def sample_tokens(self, masks: TokenMasks | None) -> PendingOutput:
        if self._step is None:
            raise RuntimeError("sample_tokens was called without an execute_model before it")
        step, self._step = self._step, None
        if step.structured:
            each = (None,) * len(self._data_ranks) if masks is None else masks.of_ranks
            for rank, part, own in zip(self._data_ranks, step.of_ranks, each, strict=True):
                if part.structured:
                    self._send(encode_masks(own, is_shared=self._masks is not None), rank.last)
        else:
            self._send_step(step)
        number = self._num_steps
        self._num_steps += 1
        return _PendingStep(self, number)

    def _send_step(self, step: SchedulerOutput) -> None:
        number = self._num_steps
        for rank, part in zip(self._data_ranks, step.of_ranks, strict=True):
            if rank.middle and part.new_requests:
                self._send(encode_call(number, part), [each for each in rank.all if each not in rank.middle])
                self._send(encode_call(number, without_token_ids(part)), rank.middle)
            else:
                self._send(encode_call(number, part), rank.all)

    def wait_for(self, number: int) -> ModelRunnerOutput:
        """The output of a step, once."""
        self._check_alive()
        while not all(rank.outputs.has(number) for rank in self._data_ranks):
            self._poll()
        outputs = tuple(rank.outputs.pop(number) for rank in self._data_ranks)
        return outputs[0] if len(outputs) == 1 else OutputOfRanks([], parts=outputs)

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """See `Executor`."""
        self._check()
        self._num_rpcs += 1
        self._rpc_results.clear()
        self._send(encode_rpc(self._num_rpcs, method, args, kwargs or {}))
        while len(self._rpc_results) < self._num_workers:
            self._poll()
        results = [self._rpc_results[rank] for rank in range(self._num_workers)]
        for result in results:
            if (failure := result.failure) is not None:
                reported = RuntimeError(f"worker {failure.rank}: {failure.text}\n\n{failure.trace}")
                raise failure.as_error() or reported from reported
        return [decode_value(result.value) for result in results]

    def shutdown(self) -> None:
        """End all workers. Does nothing when called again. Raises WorkerError if a worker has failed before, or could
        not shut down; all have ended nevertheless."""
        if self._is_shut_down:
            return
        reason = ""
        try:
            self._check()
            self._channel.flush()
            self._send(_SHUTDOWN)
            self._processes.join()
        except BaseException as error:
            reason = str(error) or type(error).__name__
            raise
        finally:
            self._close(reason)

    # --- replies ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise if a worker has failed or ended."""
        self._check_alive()
        if self._poller.poll(0):
            self._poll()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise WorkerError(str(self._failure)) from self._failure
        if self._is_shut_down:
            raise RuntimeError("the workers were shut down")

    def _send(self, message: bytes, ranks: Iterable[int] | None = None) -> None:
        """Raise WorkerError if a worker has ended, even if that has just happened."""
        try:
            self._channel.send(message, ranks)
        except ConnectionError as error:
            self._fail(self._find_loss() or str(error))

    def _poll(self) -> None:
        """Wait for replies or the end of a process, and process them.

        Raises WorkerError if a worker has failed or ended; during the start what the worker raised.
        """
        self._poller.poll()
        while (message := self._channel.receive()) is not None:
            try:
                reply = decode_reply(message)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.warning("a message that is no reply of a worker is ignored: %s", error)
                continue
            if not 0 <= reply.rank < self._num_workers:
                logger.warning("a reply of rank %d is ignored: the plan has %d ranks", reply.rank, self._num_workers)
                continue
            if isinstance(reply, StepOutput):
                self._data_ranks[reply.rank // len(self._data_ranks[0].all)].outputs.add(reply)
            elif isinstance(reply, RpcResult):
                if reply.number == self._num_rpcs:
                    self._rpc_results[reply.rank] = reply
            elif isinstance(reply, Ready):
                self._ready[reply.rank] = reply
            else:
                self._raise_failure(reply)
        if loss := self._find_loss():
            self._fail(loss)

    def _find_loss(self, wait_ms: int = 0) -> str:
        """A sentence about a worker or another machine that has ended; empty if all are there."""
        loss = self._processes.find_loss()
        if loss and len(self._ready) < self._num_workers:
            loss += " before it was ready: see what it has written to standard error"
        return loss or self._rendezvous.find_loss(wait_ms)

    def _raise_failure(self, failure: Failure) -> None:
        # a process that ends makes other workers raise, and is the cause; a worker that raises does not end
        if loss := self._find_loss(_NODE_WAIT_MS):
            self._fail(loss)
        reported = WorkerError(f"worker {failure.rank} failed: {failure.text}\n\n{failure.trace}")
        if len(self._ready) < self._num_workers and (error := failure.as_error()) is not None:
            self._failure = reported
            self._close(f"worker {failure.rank} failed: {failure.text}")
            raise error from reported
        self._fail(str(reported))

    def _fail(self, reason: str) -> None:
        self._failure = WorkerError(reason)
        self._close(reason)
        raise self._failure

    def _close(self, reason: str) -> None:
        """Kill what still runs and give everything back; other nodes receive the reason, empty if nothing failed."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._rendezvous.close(reason)
        self._processes.kill()
        self._channel.close()


@dataclass(slots=True)
class _PendingStep:
    """Implements `PendingOutput`."""

    executor: MultiprocessExecutor
    number: int
    output: ModelRunnerOutput | None = None

    def get(self) -> ModelRunnerOutput:
        if self.output is None:
            self.output = self.executor.wait_for(self.number)
        return self.output


def _abandon(pid: int, processes: Any, rendezvous: Any) -> None:
    """Safe in any thread. Does nothing in a process that was forked from the engine's."""
    if os.getpid() != pid:
        return
    with contextlib.suppress(Exception):
        processes.kill()
    rendezvous.close("node 0 has ended without a shutdown of the engine")


class _DataRank:
    """The workers of a data-parallel rank: ``all``; ``last``, of the stage that samples; ``middle``, of stages that
    read no tokens. ``stage``: workers of a stage."""

    def __init__(self, ranks: range, stage: int, plan: EnginePlan) -> None:
        self.all, self.last, self.middle = ranks, ranks[-stage:], ranks[stage:-stage]
        self.outputs = StepOutputs(ranks[plan.output_rank], sum(rank in ranks for rank in plan.reply_ranks))


# --- merging the ranks' outputs -------------------------------------------------------------------------------------


class StepOutputs:
    """Outputs of steps in flight, by the steps' numbers. ``output_rank``: the rank that reports sampled tokens, one of
    ``num_replies`` that reply to each step."""

    def __init__(self, output_rank: int, num_replies: int) -> None:
        self._output_rank = output_rank
        self._num_replies = num_replies
        self._merger = KVOutputMerger(num_replies)
        self._steps: defaultdict[int, dict[int, ModelRunnerOutput]] = defaultdict(dict)  # step -> rank -> output

    def add(self, reply: StepOutput) -> None:
        """Add the output of one rank."""
        self._steps[reply.number][reply.rank] = reply.output

    def has(self, number: int) -> bool:
        """Whether all have replied."""
        return len(self._steps[number]) == self._num_replies

    def pop(self, number: int) -> ModelRunnerOutput:
        """The output of a step to which all have replied, with their merged KV connector outputs."""
        outputs = self._steps.pop(number)
        output = outputs[self._output_rank]
        output.kv_connector_output = self._merger.merge(each.kv_connector_output for each in outputs.values())
        return output


class KVOutputMerger:
    """Merges the outputs of all ranks: a transfer has ended when it has ended on every rank, and has failed if it has
    failed on any."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loads: Counter[str] = Counter()
        self._sends: Counter[str] = Counter()
        self._failures: dict[str, TransferFailure] = {}

    def merge(self, outputs: Iterable[KVConnectorOutput | None]) -> KVConnectorOutput | None:
        """Add the outputs of some ranks, in any order; returns what has now ended on all ranks."""
        merged = KVConnectorOutput()
        for output in outputs:
            if output is None:
                continue
            for name, count in output.counters.items():
                merged.counters[name] = merged.counters.get(name, 0) + count
            merged.addresses.update(output.addresses)
            for request_id, failure in output.failed.items():
                self._failures.setdefault(request_id, failure)
            for request_id in (*output.loaded, *output.failed):
                if not self._has_ended(self._loads, request_id):
                    continue
                if request_id in self._failures:
                    merged.failed[request_id] = self._failures.pop(request_id)
                else:
                    merged.loaded.add(request_id)
            merged.sent.update(request_id for request_id in output.sent if self._has_ended(self._sends, request_id))
        return None if merged.is_empty else merged

    def _has_ended(self, counts: Counter[str], request_id: str) -> bool:
        counts[request_id] += 1
        if counts[request_id] < self._num_ranks:
            return False
        del counts[request_id]
        return True
