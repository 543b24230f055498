"""The worker processes of one machine: started together, watched, and ended together."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType

from fleetfoot.config import env
from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor.messages import Store, WorkerAddresses
from fleetfoot.executor.protocol import WorkerError
from fleetfoot.kernels.runtime.compile_worker import CompilePool
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.utils.logs import TextFormatter
from fleetfoot.utils.network import interface_of, local_address_to
from fleetfoot.utils.own_files import OwnFolder
from fleetfoot.utils.process import num_cores
from fleetfoot.utils.progress import is_shown

logger = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""How long workers may take to give everything back."""
_REAP_S = 5.0
"""How long a process that has closed its files may take to end."""
_PR_SET_PDEATHSIG = 1
"""An option of prctl(2)."""


class WorkerProcesses:
    """A process for each rank of this machine. They end when this process does, however that happens."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._reader, self._lifeline = self._context.Pipe(duplex=False)
        self.by_rank: dict[int, BaseProcess] = {}

    def start(
        self, plan: EnginePlan, addresses: Sequence[WorkerAddresses], store: Store, masks: MaskMemory | None = None
    ) -> None:
        """Start all, given the addresses of all ranks; if that fails, `kill` ends those that were started.

        ``masks``: what the engine computes token masks in; None: they come by message.
        """
        size = plan.config.local_world_size
        # the parent, if it lives as long as the thread that starts the processes
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        log_level = logging.getLogger("fleetfoot").getEffectiveLevel()
        with self._reader, env.defaults(_variables(plan, size)), _spawning():
            for rank in range(plan.config.node_rank * size, (plan.config.node_rank + 1) * size):
                shows_progress = is_shown() and not self.by_rank  # the first one, for all
                arguments = (plan, rank, addresses[rank], store, masks, self._reader, parent, log_level, shows_progress)
                name = f"fleetfoot-worker-{rank}"
                process = self._context.Process(target=run_worker, args=arguments, name=name, daemon=True)
                process.start()
                # a fork of this process would end it when it exits
                multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
                self.by_rank[rank] = process

    @property
    def sentinels(self) -> list[int]:
        """File descriptors that become readable when their process ends."""
        return [process.sentinel for process in self.by_rank.values()]

    def find_loss(self, *, only_failed: bool = False) -> str:
        """A sentence about a worker that has ended (``only_failed``: with an error); empty if all are there."""
        over = set(wait(self.sentinels, timeout=0))
        for rank, process in self.by_rank.items():
            if process.sentinel in over:
                process.join(_REAP_S)
                if not (only_failed and process.exitcode == 0):
                    return f"worker {rank} (process {process.pid}) {_describe_exit(process.exitcode)}"
        return ""

    def join(self) -> None:
        """Wait at most `SHUTDOWN_S` until all have ended, and kill those that have not.

        Raises WorkerError if a worker has ended with an error.
        """
        until = time.monotonic() + SHUTDOWN_S
        for process in self.by_rank.values():
            process.join(max(0.0, until - time.monotonic()))
        loss = self.find_loss(only_failed=True)
        self.kill()
        if loss:
            raise WorkerError(f"{loss} when it was to shut down: see what it has written to standard error")

    def kill(self) -> None:
        """End all at once. Safe in any thread, and again."""
        self._lifeline.close()
        for process in self.by_rank.values():
            process.kill()
        for process in self.by_rank.values():
            process.join(_REAP_S)


@contextmanager
def _spawning() -> Iterator[None]:
    """Processes that are spawned within do not run the program's main file again, to find what it defines: workers need
    nothing of it, so a script can make an engine at its top level. They inherit that Ctrl-C is blocked, and ignore it
    once Python has started."""
    resource_tracker.ensure_running()  # its start unblocks the signal
    program = sys.modules["__main__"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        sys.modules["__main__"] = ModuleType("__main__")
        yield
    finally:
        sys.modules["__main__"] = program
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "does not respond"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"


def _variables(plan: EnginePlan, num_processes: int) -> dict[str, str]:
    """Defaults for the environment of the processes."""
    # each queue of a GPU waits for its own work only: transfers beside steps, sums beside copies
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if plan.device == "cpu":
        variables["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_processes))
    if plan.config.world_size > 1 and sys.platform == "linux":
        # by themselves gloo takes what the machine's name resolves to, and NCCL any interface that is not the loopback
        if name := interface_of(address := _own_address(plan.config)):
            variables |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
        else:
            message = "no network interface has the address %s: gloo and NCCL choose, without *_SOCKET_IFNAME"
            logger.warning(message, address)
    return variables


def _own_address(config: EngineConfig) -> str:
    """This machine's address for the ranks of others."""
    if config.nnodes == 1:
        return "127.0.0.1"
    return config.master_addr if config.node_rank == 0 else local_address_to(config.master_addr)


# --- in the worker's process ----------------------------------------------------------------------------------------


def run_worker(
    plan: EnginePlan,
    rank: int,
    addresses: WorkerAddresses,
    store: Store,
    masks: MaskMemory | None,
    lifeline: Connection,
    parent: int | None,
    log_level: int,
    shows_progress: bool = False,
) -> None:
    """The main function of a worker process. Torch is imported after the process is certain to end with its parent.

    ``masks``: as of `WorkerProcesses.start`. ``lifeline``: the reading end of a pipe that is closed, by whatever means,
    when the parent ends. ``parent``: its process id; None: the thread that started this process may end before it.
    ``shows_progress``: whether this worker's start is shown on the terminal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the engine decides
    signal.signal(signal.SIGTERM, _end_later)
    _end_with_parent(lifeline, parent)
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter(f"%(levelname)s %(name)s (worker {rank}): %(message)s"))
    logger = logging.getLogger("fleetfoot")
    logger.addHandler(handler)
    logger.setLevel(log_level)
    begin = time.perf_counter()
    pool = CompilePool.beside_imports(plan.config.world_size) if plan.compiles_kernels else None
    from fleetfoot.executor.worker_loop import run_worker_loop

    logger.info("imports: %.2f s", time.perf_counter() - begin)
    exit_code = 0
    try:
        run_worker_loop(plan, rank, addresses, store, masks, pool, shows_progress=shows_progress)
    except BaseException:
        logger.exception("the worker could not shut down cleanly")
        exit_code = 1
    # everything is given back; a full exit of Python and torch would add seconds to the engine's shutdown
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _end_later(number: int, _: object) -> None:
    """SIGTERM may have reached all processes of a service. The engine has time to shut down before a worker ends."""
    timer = threading.Timer(SHUTDOWN_S, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()


def _end_with_parent(lifeline: Connection, parent: int | None) -> None:
    """By a thread that waits for the end of the pipe, and by a signal of the kernel, which also ends a stuck process.

    The kernel sends the signal when the thread ends that has started this process.
    """

    def wait_for_end() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        os._exit(1)

    threading.Thread(target=wait_for_end, name="fleetfoot-lifeline", daemon=True).start()
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the request
            os._exit(1)


# --- the rendezvous on one machine ----------------------------------------------------------------------------------


class RendezvousDir:
    """A private directory for the sockets of an engine and the file of torch.distributed.

    Like `fleetfoot.executor.nodes.EngineNodes`, for an engine without other nodes.
    """

    descriptors: Sequence[int] = ()
    worker_key: bytes | None = None

    def __init__(self) -> None:
        self._folder = OwnFolder("fleetfoot-ranks-")
        self.place = self._folder.path
        self.store = str(self.place / "store")

    def gather(self, addresses: Sequence[WorkerAddresses]) -> None:
        """There are no other nodes."""

    def find_loss(self, wait_ms: int = 0) -> str:
        """Empty."""
        return ""

    def close(self, reason: str = "") -> None:
        """Remove the directory. Safe in any thread, and again."""
        self._folder.close()
