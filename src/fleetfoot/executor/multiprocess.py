"""Runs steps in worker processes, a rank each, on one machine or several.

Steps are sent without waiting. Their outputs come back in the order of the steps; whoever wants one waits for it, and
for anything that says that it will never come: a worker's traceback, the end of its process, another machine's end.
Then everything ends, and every call raises that cause.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref

import zmq

from fleetfoot.executor.channel import EngineChannel
from fleetfoot.executor.errors import WorkerError
from fleetfoot.executor.messages import Answer, Failure, Ready, decode_report, encode_step
from fleetfoot.executor.nodes import EngineNodes, check_devices, check_is_first_node
from fleetfoot.executor.outputs import StepOutputs
from fleetfoot.executor.processes import WorkerProcesses
from fleetfoot.executor.ranks import answering_ranks, output_rank
from fleetfoot.executor.rendezvous_dir import MeetingFolder
from fleetfoot.executor.specs import Rendezvous, worker_specs
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.runner.contract import PendingOutput

_SHUTDOWN_S = 10.0
"""How long workers may take to give everything back."""
_NEWS_MS = 1000
"""How long to wait, after a worker has complained, for another machine to say that one of its own is gone."""
_OVER = b""
"""The message that ends a worker."""


class MultiprocessExecutor:
    """Implements `fleetfoot.executor.protocol.Executor`.

    One thread at a time may use it.

    Args:
        plan: of the engine; this machine must be its first.

    Raises:
        ValueError: as `fleetfoot.executor.build.start_executor` says.
        WorkerError: a worker's process has ended when it was to start.
    """

    def __init__(self, plan: EnginePlan) -> None:
        check_is_first_node(plan.config)
        check_devices(plan)
        self._failure: WorkerError | None = None
        self._is_shut_down = False
        self._step: SchedulerOutput | None = None
        self._num_steps = 0
        self._ready: dict[int, Ready] = {}
        self._outputs = StepOutputs(output_rank(plan.config), len(answering_ranks(plan)))
        self._num_workers = plan.config.world_size
        self._folder = MeetingFolder()
        self._processes: WorkerProcesses | None = None
        self._nodes: EngineNodes | None = None
        self._channel: EngineChannel | None = None
        try:
            self._start(plan)
        except BaseException as error:
            self._end(str(error))
            raise
        self.layout: KVLayout = pickle.loads(self._ready[0].layout)
        self.runner_name = self._ready[0].runner_name

    def _start(self, plan: EnginePlan) -> None:
        if plan.config.nnodes > 1:
            nodes = self._nodes = EngineNodes(plan)
            channel = self._channel = EngineChannel(nodes.address, self._num_workers)
            nodes.gather(channel.addresses)
            rendezvous = Rendezvous(None, nodes.address, nodes.store_port)
        else:
            channel = self._channel = EngineChannel(self._folder.path, self._num_workers)
            rendezvous = Rendezvous(str(self._folder.path / "meeting-point"))
        self._processes = WorkerProcesses(worker_specs(plan, channel.addresses, rendezvous))
        # for whoever forgets to shut down, or just ends; then a thread may still use the sockets, which it has alone
        weakref.finalize(self, _abandon, self._processes, self._folder)
        closing = weakref.finalize(self, channel.close)
        closing.atexit = False  # type: ignore[misc]  # it is a property
        self._poller = zmq.Poller()
        self._poller.register(channel.reports, zmq.POLLIN)
        for descriptor in (*self._processes.sentinels, *(self._nodes.descriptors if self._nodes else ())):
            self._poller.register(descriptor, zmq.POLLIN)
        while len(self._ready) < self._num_workers:
            self._hear()

    @property
    def worker_pids(self) -> dict[int, int]:
        """Process ids of this machine's workers, by rank."""
        return {} if self._processes is None else self._processes.pids

    # --- steps ------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Take a step, which is sent when `sample_tokens` is called.

        Raises:
            WorkerError: a worker is no more; also what `sample_tokens` and its output raise.
        """
        self._check()
        self._step = scheduler_output

    def sample_tokens(self, grammar_output: object | None) -> PendingOutput:
        if self._step is None or self._channel is None:
            raise RuntimeError("sample_tokens was called without an execute_model before it")
        step, self._step = self._step, None
        number = self._num_steps
        self._num_steps += 1
        self._outputs.expect(number)
        self._send(encode_step(number, step, grammar_output))
        return _PendingStep(self, number)

    def wait_for(self, number: int) -> ModelRunnerOutput:
        """The output of a step, once."""
        self._check_known()
        while not self._outputs.is_complete(number):
            self._hear()
        return self._outputs.take(number)

    def shutdown(self) -> None:
        """End all workers. Again: does nothing.

        Raises:
            WorkerError: one has failed before, or could not give back what it held; all have ended nevertheless.
        """
        if self._is_shut_down:
            return
        try:
            if self._failure is None and self._channel is not None and self._processes is not None:
                self._check()
                self._channel.flush()
                self._send(_OVER)
                if self._nodes is not None:
                    self._nodes.say_over()
                self._processes.join(_SHUTDOWN_S)
        finally:
            self._end("")

    # --- what comes back --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise if a worker is no more."""
        self._check_known()
        if self._poller.poll(0):
            self._hear()

    def _check_known(self) -> None:
        if self._failure is not None:
            raise WorkerError(str(self._failure)) from self._failure
        if self._is_shut_down:
            raise RuntimeError("the workers were shut down")

    def _send(self, message: bytes) -> None:
        """Raise WorkerError if a worker is no more, even if that has just happened."""
        assert self._channel is not None
        try:
            self._channel.send(message)
        except ConnectionError as error:
            self._fail_by(self._gone() or str(error))

    def _hear(self) -> None:
        """Wait until something comes, and take it in.

        Raises:
            WorkerError: it is bad news. When starting, what a worker raised, as it was.
        """
        assert self._channel is not None and self._processes is not None
        self._poller.poll()
        while (message := self._channel.receive()) is not None:
            report = decode_report(message)
            if isinstance(report, Answer):
                self._outputs.add(report)
            elif isinstance(report, Ready):
                self._ready[report.rank] = report
            else:
                self._fail(report)
        if gone := self._gone():
            self._fail_by(gone)

    def _gone(self, wait_ms: int = 0) -> str:
        """A sentence about a worker, or another machine, that is no more; empty: all are there."""
        assert self._processes is not None
        for sentence in self._processes.ended().values():
            if len(self._ready) < self._num_workers:
                sentence += " before it was ready: see what it has written to standard error"
            return sentence
        return "" if self._nodes is None else self._nodes.gone(wait_ms)

    def _fail(self, failure: Failure) -> None:
        # one that is gone makes others complain, and is the cause; one that complains stays
        gone = self._gone(_NEWS_MS if self._nodes is not None else 0)
        if gone:
            self._fail_by(gone)
        told = WorkerError(f"worker {failure.rank} failed: {failure.text}\n\n{failure.trace}")
        if len(self._ready) < self._num_workers and failure.error:
            error = pickle.loads(failure.error)
            self._failure = told
            self._end(f"worker {failure.rank} failed: {failure.text}")
            raise error from told
        self._fail_by(str(told))

    def _fail_by(self, reason: str) -> None:
        self._failure = WorkerError(reason)
        self._end(reason)
        raise self._failure

    def _end(self, reason: str) -> None:
        """Kill what still runs and give everything back."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._nodes is not None:
            self._nodes.close(reason)
        if self._processes is not None:
            self._processes.kill()
        if self._channel is not None:
            self._channel.close()
        self._folder.remove()


class _PendingStep:
    """Implements `PendingOutput`."""

    __slots__ = ("_executor", "_number", "_output")

    def __init__(self, executor: MultiprocessExecutor, number: int) -> None:
        self._executor = executor
        self._number = number
        self._output: ModelRunnerOutput | None = None

    def get(self) -> ModelRunnerOutput:
        if self._output is None:
            self._output = self._executor.wait_for(self._number)
        return self._output


def _abandon(processes: WorkerProcesses, folder: MeetingFolder) -> None:
    """In any thread."""
    with contextlib.suppress(Exception):
        processes.kill()
    folder.remove()
