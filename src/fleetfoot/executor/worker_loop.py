"""The loop of a worker process: start, execute calls, reply, until an empty message ends it."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

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

_Send = Callable[[int, PendingOutput], object]
"""Takes the number and the output of a step."""


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
    with _reply_sender(worker, channel) as send, short_collections():
        while message := channel.receive():
            call = decode_call(message)
            worker.runner.execute_model(call.scheduler_output)
            send(call.number, worker.runner.sample_tokens(call.grammar_output))


@contextmanager
def _reply_sender(worker: Worker, channel: WorkerChannel) -> Iterator[_Send]:
    """Sends the outputs of steps to the engine, if this rank replies.

    On a CPU an output is ready when it is made. On a GPU a thread waits for it, and the next step is queued meanwhile.
    """
    if worker.rank not in worker.plan.reply_ranks:
        yield lambda number, pending: None
        return
    if worker.device.type == "cpu":
        with channel.open_replies() as replies:
            yield lambda number, pending: replies.send(encode_reply(StepOutput(worker.rank, number, pending.get())))
        return
    outputs: SimpleQueue[tuple[int, PendingOutput] | None] = SimpleQueue()
    thread = threading.Thread(target=_send_outputs, args=(worker.rank, channel, outputs), name="fleetfoot-replies")
    thread.daemon = True
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    thread.start()
    yield lambda number, pending: outputs.put((number, pending))
    outputs.put(None)
    thread.join()


def _send_outputs(rank: int, channel: WorkerChannel, outputs: SimpleQueue[tuple[int, PendingOutput] | None]) -> None:
    """In a thread: send outputs as they become ready, until None."""
    with channel.open_replies() as replies:
        try:
            while (item := outputs.get()) is not None:
                number, pending = item
                replies.send(encode_reply(StepOutput(rank, number, pending.get())))
        except BaseException as error:
            replies.send(encode_reply(Failure.of(rank, error, traceback.format_exc())))
