"""The loop of a worker process: start, execute calls, reply, until an empty message ends it."""

from __future__ import annotations

import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch
import torch.distributed as dist

from fleetfoot.config.model_registry import load_general_plugins
from fleetfoot.distributed.groups import StepShape, make_groups
from fleetfoot.executor.messages import (
    Failure,
    Ready,
    RpcResult,
    StepOutput,
    Store,
    WorkerAddresses,
    WorkerChannel,
    decode_call,
    decode_masks,
    decode_rpc,
    is_rpc,
    worker_keys,
)
from fleetfoot.executor.values import encode_value
from fleetfoot.executor.worker import Worker, phase
from fleetfoot.kernels.runtime.compile_worker import CompilePool
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.step import PendingOutput
from fleetfoot.runner.v2.padding_work import open_compiler
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.process import SHORT_COLLECTIONS
from fleetfoot.utils.progress import loading_bar

_SWITCH_INTERVAL_S = 0.0005
"""How long the thread that queues steps may hold Python's lock while another replies; the default, 5 ms, is as long
as a step."""


def run_worker_loop(
    plan: EnginePlan,
    rank: int,
    addresses: WorkerAddresses,
    store: Store,
    memory: MaskMemory | None = None,
    pool: CompilePool | None = None,
    key: ClusterKey | None = None,
    device_index: int | None = None,
    *,
    shows_progress: bool = False,
) -> None:
    """Return when the engine ends the worker; arguments as of `fleetfoot.executor.processes.run_worker`, and ``pool``
    as of `open_compiler`. ``key``: of the sockets between machines; None: the cluster's. ``device_index``: the GPU;
    None: that of the rank on its machine.

    A worker that raises reports it, and keeps all its connections until the engine ends it: closing them would make
    other ranks raise too, and hide the cause. What it raised, or raises after the last message, is raised here.
    """
    keys = None
    if addresses.engine_key is not None:
        keys = worker_keys(key or plan.config.find_cluster_key(plan.config.master_addr), plan.engine_id)
    channel = WorkerChannel(addresses, keys)
    try:
        load_general_plugins()
        with loading_bar(is_shown=shows_progress):
            worker = _start(plan, rank, store, pool, device_index)
        with channel.open_replies() as reply:
            reply(Ready(rank, worker.layout, worker.runner_name))
        with channel.open_replies() as reply, _reply_sender(worker, channel) as send, SHORT_COLLECTIONS:
            while message := channel.receive():
                if is_rpc(message):
                    reply(_run_rpc(worker, message))
                    continue
                if worker.runner.has_failed:  # an output has, and was reported
                    continue
                number, scheduler_output = decode_call(message)
                worker.execute_model(scheduler_output)
                masks = None
                if scheduler_output.structured and worker.samples:
                    if not (message := channel.receive()):
                        break
                    masks = decode_masks(message, memory)
                send(number, worker.sample_tokens(masks))
    except BaseException as error:
        with channel.open_replies() as reply:
            reply(Failure.of(rank, error, traceback.format_exc()))
            while channel.receive():
                pass
        raise
    worker.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    channel.close()


def _run_rpc(worker: Worker, message: bytes) -> RpcResult:
    number, payload = decode_rpc(message)
    try:
        method, args, kwargs = pickle.loads(payload)
        value = encode_value(worker.call(method, args, kwargs))
    except Exception as error:
        return RpcResult(worker.rank, number, failure=Failure.of(worker.rank, error, traceback.format_exc()))
    return RpcResult(worker.rank, number, value)


def _start(
    plan: EnginePlan, rank: int, store: Store, pool: CompilePool | None = None, device_index: int | None = None
) -> Worker:
    config, device = plan.config, torch.device(plan.device)
    if plan.device == "cuda":
        device = torch.device("cuda", rank % config.local_world_size if device_index is None else device_index)
        torch.cuda.set_device(device)
    ahead, groups = None, None
    if plan.runner == "v2":
        ahead = open_compiler(config.world_size, device, pool)
    if config.world_size > 1:
        ranks: dist.Store
        if isinstance(store, str):
            ranks = dist.FileStore(store, config.world_size)
        else:
            ranks = dist.PrefixStore("workers", dist.TCPStore(*store, is_master=False))
        backend = "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo"
        with phase("groups"):
            dist.init_process_group(backend, store=ranks, rank=rank, world_size=config.world_size)
            shape = StepShape(plan.max_num_batched_tokens, plan.model.hidden_size, getattr(torch, plan.dtype), device)
            groups = make_groups(config.group_sizes, shape)
    worker = Worker(plan, rank, groups, ahead)
    worker.start()
    return worker


@contextmanager
def _reply_sender(worker: Worker, channel: WorkerChannel) -> Iterator[Callable[[int, PendingOutput], object]]:
    """Sends the numbers and outputs of steps to the engine, if this rank replies.

    On a CPU an output is ready when it is made. On a GPU a thread waits for it, and the next step is queued meanwhile.
    """
    if worker.rank not in worker.plan.reply_ranks:
        yield lambda number, pending: None
        return
    if worker.device.type == "cpu":
        with channel.open_replies() as reply:
            yield lambda number, pending: reply(StepOutput(worker.rank, number, pending.get()))
        return
    outputs: SimpleQueue[tuple[int, PendingOutput] | None] = SimpleQueue()
    arguments = worker, channel, outputs
    thread = threading.Thread(target=_send_outputs, args=arguments, name="fleetfoot-replies", daemon=True)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    thread.start()
    yield lambda number, pending: outputs.put((number, pending))
    outputs.put(None)
    thread.join()


def _send_outputs(
    worker: Worker, channel: WorkerChannel, outputs: SimpleQueue[tuple[int, PendingOutput] | None]
) -> None:
    """In a thread: send outputs as they become ready, until None or one has failed."""
    with channel.open_replies() as reply:
        try:
            while (item := outputs.get()) is not None:
                number, pending = item
                reply(StepOutput(worker.rank, number, pending.get()))
        except BaseException as error:
            worker.runner.has_failed = True
            reply(Failure.of(worker.rank, error, traceback.format_exc()))
