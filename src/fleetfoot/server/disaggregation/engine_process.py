"""An engine in a process of its own, started from Python. From a shell, use `fleetfoot engine`.

The process is this module, with the fields of an `fleetfoot.config.engine.EngineConfig` as JSON in its first argument.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from fleetfoot.config import env
from fleetfoot.config.engine import EngineConfig
from fleetfoot.server.disaggregation.serve import serve_engine


class EngineProcess:
    """A child process with an engine, which ends with its parent at the latest.

    Args:
        config: the fields of `fleetfoot.config.engine.EngineConfig`, as plain data.
        host, port: where it listens; port 0: any that is free.
        environment: variables beside those of this process.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        module = "fleetfoot.server.disaggregation.engine_process"
        command = [sys.executable, "-m", module, json.dumps(dict(config)), f"--host={host}", f"--port={port}"]
        self._process = subprocess.Popen(
            [*command, "--until-stdin-closes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env.for_child(environment or {}),
        )
        self._address = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> str:
        """The address at which it takes requests.

        Raises:
            RuntimeError: it has ended instead; what it had to say is on standard error.
        """
        assert self._process.stdout is not None
        while not self._address:
            line = self._process.stdout.readline()
            if not line:
                code = self._process.wait()
                raise RuntimeError(f"the engine's process {self.pid} has ended with code {code} before it was ready")
            if line.startswith(b'{"address"'):
                self._address = json.loads(line)["address"]
        return self._address

    def kill(self) -> None:
        """End it at once, as a fault would."""
        self._process.kill()
        self._process.wait()

    def stop(self, timeout: float = 30.0) -> int:
        """End it in order; its exit code. After ``timeout`` seconds it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode
        finally:
            self._process.stdout.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fleetfoot.server.disaggregation.engine_process")
    parser.add_argument("config", type=json.loads, help="the engine's settings, a JSON object")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any that is free")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the end of standard input")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    config = EngineConfig.from_keywords(options.config, owner="engine_process")
    serve_engine(config, options.host, options.port, until_stdin_closes=options.until_stdin_closes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
