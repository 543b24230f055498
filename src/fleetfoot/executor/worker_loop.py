"""The loop of a worker process: start, execute calls, reply, until an empty message ends it."""

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
from fleetfoot.executor.messages import (
    Failure,
    Ready,
    Rendezvous,
    StepOutput,
    WorkerChannel,
    WorkerSpec,
    decode_call,
    encode_reply,
)
from fleetfoot.executor.worker import Worker
from fleetfoot.runner.contract import PendingOutput
from fleetfoot.utils.process import short_collections

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""For how long the thread that queues steps may hold Python's lock while another replies; the default, 5 ms, is as long
as a step."""


def run_worker_loop(spec: WorkerSpec) -> None:
    """Return when the engine ends the worker.

    A worker that raises reports it, and then keeps all its connections until the engine ends it: closing them would
    make other ranks raise as well, and hide the cause. What it raised, or raises after the engine's last message, is
    raised here.
    """
    channel = WorkerChannel(spec.addresses)
    try:
        worker = _start(spec)
        with channel.open_replies() as replies:
            replies.send(encode_reply(Ready(worker.rank, pickle.dumps(worker.layout), worker.build)))
        _run_calls(worker, channel)
    except BaseException as error:
        channel.open_replies().send(encode_reply(Failure.of(spec.rank, error, traceback.format_exc())))
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


def _run_calls(worker: Worker, channel: WorkerChannel) -> None:
    """Until an empty message arrives."""
    sender: _OutputSender = _NoSender()
    if worker.rank in worker.plan.reply_ranks:
        sender = (_ThreadedSender if worker.device.type == "cuda" else _DirectSender)(worker.rank, channel)
    with short_collections():
        while message := channel.receive():
            call = decode_call(message)
            worker.runner.execute_model(call.scheduler_output)
            sender.send(call.number, worker.runner.sample_tokens(call.grammar_output))
    sender.close()


class _OutputSender(Protocol):
    """Sends a worker's outputs to the engine."""

    def send(self, number: int, pending: PendingOutput) -> None: ...

    def close(self) -> None: ...


class _NoSender:
    """For ranks that do not reply."""

    def send(self, number: int, pending: PendingOutput) -> None:
        pass

    def close(self) -> None:
        pass


class _DirectSender:
    """For a CPU, where an output is ready when it is made."""

    def __init__(self, rank: int, channel: WorkerChannel) -> None:
        self._rank = rank
        self._replies = channel.open_replies()

    def send(self, number: int, pending: PendingOutput) -> None:
        self._replies.send(encode_reply(StepOutput(self._rank, number, pending.get())))

    def close(self) -> None:
        self._replies.close()


class _ThreadedSender:
    """For a GPU: a thread waits for outputs, and the next step is queued meanwhile."""

    def __init__(self, rank: int, channel: WorkerChannel) -> None:
        self._rank = rank
        self._channel = channel
        self._queue: SimpleQueue[tuple[int, PendingOutput] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fleetfoot-replies", daemon=True)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._thread.start()

    def send(self, number: int, pending: PendingOutput) -> None:
        self._queue.put((number, pending))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._channel.open_replies() as replies:
            try:
                while (item := self._queue.get()) is not None:
                    number, pending = item
                    replies.send(encode_reply(StepOutput(self._rank, number, pending.get())))
            except BaseException as error:
                replies.send(encode_reply(Failure.of(self._rank, error, traceback.format_exc())))
