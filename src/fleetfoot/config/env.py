"""Environment variables. No other module of the package reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

USE_V2_MODEL_RUNNER = "FLEETFOOT_USE_V2_MODEL_RUNNER"
"""Unset: the oracle chooses the model runner; ``0``: V1; ``1``: V2. `use_v2_model_runner` reads it."""
USE_NATIVE_KERNELS = "FLEETFOOT_USE_NATIVE_KERNELS"
"""``0``: the C kernels for CPUs are not used, as if they had not been built; ``1`` or unset: used where they load."""
NATIVE_VARIANT = "FLEETFOOT_NATIVE_VARIANT"
"""The instruction set of the C kernels for CPUs, for one that is not the best: ``amx``, ``avx512_bf16``, ``avx512``,
``avx2``, ``sse4``."""
TRITON_CACHE_DIR = "TRITON_CACHE_DIR"
"""The folder of Triton's compiled kernels, by default ``~/.triton/cache``."""
CLUSTER_KEY = "FLEETFOOT_CLUSTER_KEY"
"""The secret that the processes of a deployment share (`fleetfoot.utils.cluster_key`), where no file has it."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Which GPUs a process sees, by number or name."""
NO_COLOR = "NO_COLOR"
"""Any non-empty value: no colours on terminals (https://no-color.org)."""


def use_v2_model_runner(environ: Mapping[str, str] | None = None) -> bool | None:
    """The value of ``FLEETFOOT_USE_V2_MODEL_RUNNER`` in ``environ`` (None: the process's own); None: unset. Raises
    ValueError: it holds anything but 0 or 1, an empty string included."""
    value = (os.environ if environ is None else environ).get(USE_V2_MODEL_RUNNER)
    return _parse_flag(
        USE_V2_MODEL_RUNNER, value, "0 (Model Runner V1), 1 (Model Runner V2) or unset (the oracle chooses)"
    )


def use_native_kernels() -> bool:
    """Whether the C kernels may be used. Raises ValueError: ``FLEETFOOT_USE_NATIVE_KERNELS`` holds anything but 0 or 1,
    an empty string included."""
    return _parse_flag(USE_NATIVE_KERNELS, os.environ.get(USE_NATIVE_KERNELS), "0, 1 or unset (1)") is not False


def native_variant(allowed: Sequence[str]) -> str | None:
    """The value of ``FLEETFOOT_NATIVE_VARIANT``; None: unset. Raises ValueError: it is not in ``allowed``."""
    value = os.environ.get(NATIVE_VARIANT)
    if value is not None and value not in allowed:
        raise ValueError(f"{NATIVE_VARIANT} is {value!r}; it can be {', '.join(allowed)} or unset (the best one)")
    return value


def _parse_flag(name: str, value: str | None, allowed: str) -> bool | None:
    if value not in (None, "0", "1"):
        raise ValueError(f"{name} is {value!r}; it can be {allowed}")
    return None if value is None else value == "1"


def openai_key() -> str | None:
    """``OPENAI_API_KEY``, which clients of OpenAI servers send; None: unset or empty."""
    return os.environ.get("OPENAI_API_KEY") or None


def no_color() -> bool:
    """Whether terminal output must have no colours."""
    return bool(os.environ.get(NO_COLOR))


def visible_gpus() -> list[str]:
    """The numbers or names in ``CUDA_VISIBLE_DEVICES``; empty: all GPUs are visible."""
    return [each.strip() for each in os.environ.get(VISIBLE_GPUS, "").split(",") if each.strip()]


def share_of_threads(number: int) -> dict[str, str]:
    """The variable for a process that shares the cores, unless the user has set it."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(number)}


def for_child(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: this process's, with ``variables`` set."""
    return {**os.environ, **variables}


def for_engine() -> dict[str, str]:
    """The environment of an engine's process beside API servers."""
    return for_child(engine_defaults())


def engine_defaults() -> dict[str, str]:
    """Variables of an engine's process beside API servers, unless the user has set such ones.

    A thread of OpenMP that waits for another one spins before it blocks, by default for milliseconds. If a server has
    the other's core, it takes a further core for nothing, so it spins for microseconds only (libgomp).
    """
    is_set = any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    return {} if is_set else {"GOMP_SPINCOUNT": "1000"}


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable for this process and its children, and restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Set each of several variables that is unset, and unset them afterwards."""
    with ExitStack() as stack:
        for name, value in variables.items():
            if name not in os.environ:
                stack.enter_context(variable(name, value))
        yield


def cache_folder() -> Path:
    """The user's folder for what can be computed again: ``fleetfoot`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    given = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~/.cache"))) / "fleetfoot"


def notify_socket() -> str | None:
    """The socket of the service manager (systemd's protocol ``sd_notify``); None if there is none."""
    return os.environ.get("NOTIFY_SOCKET") or None


def api_key() -> str | None:
    """``FLEETFOOT_API_KEY``, or vLLM's ``VLLM_API_KEY``: a key of `fleetfoot serve` that is in no list of processes."""
    return os.environ.get("FLEETFOOT_API_KEY") or os.environ.get("VLLM_API_KEY") or None


def engine_key() -> str:
    """``FLEETFOOT_ENGINE_KEY``, which ``FLEETFOOT_CLUSTER_KEY`` has replaced; empty: not set."""
    return os.environ.get("FLEETFOOT_ENGINE_KEY") or ""


def cluster_key() -> str | None:
    """``FLEETFOOT_CLUSTER_KEY``: the secret that the processes of a deployment share."""
    return os.environ.get(CLUSTER_KEY) or None


class SideChannel(NamedTuple):
    """The address of an engine for others that hand KV over."""

    host: str | None
    port: int


def nixl_side_channel() -> SideChannel:
    """vLLM's ``VLLM_NIXL_SIDE_CHANNEL_HOST`` and ``_PORT``, which manifests set to the pod's address; port 0: any.
    Raises ValueError: the port is no number."""
    port = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT") or "0"
    if not port.isdecimal():
        raise ValueError(f"VLLM_NIXL_SIDE_CHANNEL_PORT is {port!r}; it must be the number of a port")
    return SideChannel(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or None, int(port))


def admin_key() -> str | None:
    """``FLEETFOOT_ADMIN_KEY``: the key of the routes that change the engine."""
    return os.environ.get("FLEETFOOT_ADMIN_KEY") or None
