"""The process of an engine as a child of this one: its start and its end. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from fleetfoot.config import env
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.local_server import SCHEME
from fleetfoot.engine.wire import ENGINE_IGNORES, EngineState, ProcessSettings
from fleetfoot.plan.forced_runner import forced_runners
from fleetfoot.utils.own_files import OwnFolder
from fleetfoot.utils.process import write_to


async def process_end(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a child process, once it has ended. Waits in a thread that does not keep this process alive."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set_result, ended, code)

    threading.Thread(target=wait, name="fleetfoot-process-end", daemon=True).start()
    return await ended


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENGINE_IGNORES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _set_result(future: asyncio.Future[int], value: int) -> None:
    if not future.done():
        future.set_result(value)


class EngineProcess:
    """A process that runs `fleetfoot.engine.process`, and ends with this one.

    Args:
        config: the engine's settings.
        log_level, log_format: of its messages on standard error, as of `fleetfoot.utils.logs.log_to_stderr`.
        variables: of its environment, besides those of this process.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_level: int,
        log_format: str = "text",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._variables = variables
        self._folder = OwnFolder("fleetfoot-serve-")
        self.address = f"{SCHEME}{self._folder.path / 'engine'}"
        runner = next((block.runner for block in forced_runners()), None)
        self._settings = ProcessSettings(config, self.address, log_level, log_format, runner)
        self.start_again()

    def start_again(self, state: EngineState | None = None) -> None:
        """Start the process, or, when it has ended, another one at the same address. ``state``: of the one before."""
        with _signals_blocked():  # in the process, too, until it ignores them: a terminal sends them while it imports
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fleetfoot.engine.process"],
                stdin=subprocess.PIPE,
                env={**env.for_engine(), **self._variables},
            )
        write_to(self._process, pickle.dumps(replace(self._settings, state=state)))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit code, once the process has ended."""
        return await process_end(self._process)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def stop(self, timeout: float = 30.0) -> int:
        """End the process as a client's `Stop` does, and kill it after ``timeout`` seconds. Returns its exit code."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._folder.close()
