"""A worker in a process of its own: it starts, takes steps, and answers, until it is told to end."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import traceback
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist

from fleetfoot.distributed.torch_groups import StepShape, make_groups
from fleetfoot.executor.channel import WorkerChannel
from fleetfoot.executor.messages import Answer, Ready, decode_step, encode_report, failure_of
from fleetfoot.executor.ranks import answering_ranks
from fleetfoot.executor.specs import Rendezvous, WorkerSpec
from fleetfoot.executor.worker import Worker
from fleetfoot.runner.contract import PendingOutput
from fleetfoot.utils.process import short_collections

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""For how long the thread that queues steps may keep Python from the one that answers; else 5 ms, which is a step."""


def serve(spec: WorkerSpec) -> None:
    """Returns when the engine says that it is over.

    A worker that raises reports that, and then keeps still, with all its connections, until the engine ends it or says
    that it is over: were it to leave before, others would raise as well, and nobody could tell which was the cause.
    Once it is over nobody waits for it, and what it has raised, or raises then, this raises.
    """
    channel = WorkerChannel(spec.addresses)
    try:
        worker = _start(spec)
        with channel.open_reports() as reports:
            reports.send(encode_report(_ready(worker)))
        _take_steps(worker, channel)
    except BaseException as error:
        channel.open_reports().send(encode_report(failure_of(spec.rank, error, traceback.format_exc())))
        while channel.receive():
            pass
        raise
    worker.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    channel.close()


def _start(spec: WorkerSpec) -> Worker:
    plan, config = spec.plan, spec.plan.config
    if plan.device == "cuda":
        torch.cuda.set_device(spec.local_rank)
    if config.world_size == 1:
        worker = Worker(plan)
    else:
        device = torch.device("cuda", spec.local_rank) if plan.device == "cuda" else torch.device("cpu")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo",
            store=_store(spec.rendezvous, config.world_size),
            rank=spec.rank,
            world_size=config.world_size,
        )
        shape = StepShape(plan.max_num_batched_tokens, plan.model.hidden_size, getattr(torch, plan.dtype), device)
        groups = make_groups(config.tensor_parallel_size, config.pipeline_parallel_size, shape)
        worker = Worker(plan, spec.rank, groups)
    worker.start()
    return worker


def _store(rendezvous: Rendezvous, world_size: int) -> dist.Store:
    if rendezvous.path is not None:
        return dist.FileStore(rendezvous.path, world_size)
    store = dist.TCPStore(rendezvous.address, rendezvous.port, is_master=False)
    return dist.PrefixStore("workers", store)


def _ready(worker: Worker) -> Ready:
    return Ready(worker.rank, pickle.dumps(worker.layout), worker.runner.name)


def _take_steps(worker: Worker, channel: WorkerChannel) -> None:
    """Until an empty message comes."""
    answers: _Answers = _Nobody()
    if worker.rank in answering_ranks(worker.plan):
        answers = (_Awaiting if worker.device.type == "cuda" else _AtOnce)(worker.rank, channel)
    with short_collections():
        while message := channel.receive():
            step = decode_step(message)
            worker.runner.execute_model(step.scheduler_output)
            answers.send(step.number, worker.runner.sample_tokens(step.grammar_output))
    answers.close()


class _Answers(Protocol):
    """How a worker's outputs get to the engine."""

    def send(self, number: int, pending: PendingOutput) -> None: ...

    def close(self) -> None: ...


class _Nobody:
    """The engine does not want to hear from this rank."""

    def send(self, number: int, pending: PendingOutput) -> None:
        pass

    def close(self) -> None:
        pass


class _AtOnce:
    """Where the host computes itself, an output is there when it is made."""

    def __init__(self, rank: int, channel: WorkerChannel) -> None:
        self._rank = rank
        self._reports = channel.open_reports()

    def send(self, number: int, pending: PendingOutput) -> None:
        self._reports.send(encode_report(Answer(self._rank, number, pending.get())))

    def close(self) -> None:
        self._reports.close()


class _Awaiting:
    """A thread waits for outputs that are on their way from the device; the next step is queued meanwhile."""

    def __init__(self, rank: int, channel: WorkerChannel) -> None:
        self._rank = rank
        self._channel = channel
        self._queue: SimpleQueue[tuple[int, PendingOutput] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fleetfoot-answers", daemon=True)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._thread.start()

    def send(self, number: int, pending: PendingOutput) -> None:
        self._queue.put((number, pending))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._channel.open_reports() as reports:
            try:
                while (item := self._queue.get()) is not None:
                    number, pending = item
                    reports.send(encode_report(Answer(self._rank, number, pending.get())))
            except BaseException as error:
                reports.send(encode_report(failure_of(self._rank, error, traceback.format_exc())))
