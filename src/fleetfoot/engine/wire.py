"""Messages between an engine's process and its clients, which are API servers. No torch.

A client connects to the engine's socket and sends `Hello`. A request is its `EngineRequest`; the replies are `Outputs`
or `Refused`, by the numbers of its sequences.
"""

from __future__ import annotations

import signal
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.pooling import Pooling
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.records.step import EngineOutput
from fleetfoot.utils.validation import FieldError, FieldTypeError


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What the engine's process reads from standard input, pickled."""

    config: EngineConfig
    address: str
    """The address of the socket, ``unix://...``."""
    log_level: int
    log_format: str
    forced_runner: str | None = None
    """The runner that the code forces which has created the engine, see `fleetfoot.plan.forced_runner`."""
    state: EngineState | None = None
    """The engine is brought to it before it serves."""


ENGINE_IGNORES = signal.SIGINT, signal.SIGTERM
"""Signals that the engine's process ignores: a terminal or a service manager sends them to the parent too."""
EXIT_OTHER_STATE = 3
"""The exit code of an engine's process that cannot be brought to the state in its settings."""
MAX_MESSAGE_BYTES = 256 << 20
"""The largest message of a client."""
HEARTBEAT_MS = 2000
"""Between signs of life over TCP; a connection without one for five times as long is lost."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class Failed(_Message):
    """An exception: the name of its class and its text; of a `FieldError` the problem, and what else it has."""

    kind: str
    text: str
    field: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        kinds = {ValueError: "ValueError", FileNotFoundError: "ValueError", TypeError: "TypeError"}
        kind = next((name for known, name in kinds.items() if isinstance(error, known)), type(error).__name__)
        if isinstance(error, FieldError):  # without the value, which may be of any type
            return cls(type(error).__name__, error.problem, error.field, error.code)
        return cls(kind, str(error) or type(error).__name__)

    def as_error(self) -> Exception:
        """A ValueError, TypeError, EngineDeadError or RuntimeError."""
        if self.field is not None:
            kind = FieldTypeError if self.kind == "FieldTypeError" else FieldError
            return kind(self.field, self.text, code=self.code)
        kinds: dict[str, type[Exception]] = {
            "ValueError": ValueError, "TypeError": TypeError, "EngineDeadError": EngineDeadError
        }  # fmt: skip
        return kinds.get(self.kind, RuntimeError)(self.text)


# --- from a client ----------------------------------------------------------------------------------------------------


class Hello(_Message):
    """The first message. The reply is `Ready`. Without it, others are ignored."""


class Finish(_Message):
    """End a sequence: it was aborted, or its text has a stop string. Unknown numbers are ignored. There is no reply."""

    number: int
    status: int
    """`RequestStatus`."""
    stop_reason: str | None = None


class Call(_Message):
    """A call of `fleetfoot.engine.calls.CALLS`. The reply is `Reply`."""

    number: int
    method: str
    arguments: list[Any]
    keywords: dict[str, Any] = {}


class Stop(_Message):
    """End the engine's process. Unfinished requests are aborted. There is no reply."""


# --- from the engine --------------------------------------------------------------------------------------------------


class EngineState(msgspec.Struct, array_like=True, frozen=True):
    """What calls have made of an engine. Another process that starts with the same settings can be brought to it, see
    `fleetfoot.engine.remote_calls.bring_to`; the default is the state after a start."""

    weight_version: int = 0
    weights: str | None = None
    """The folder or hub id of the last update with all tensors; None: the engine's own ``model``."""
    has_own_weights: bool = False
    """Whether weights were given as tensors or patches since then, or drawn: no other process can have them."""
    settings: dict[str, Any] = {}
    """Those that ``update_config`` has changed."""
    is_paused: bool = False
    asleep: list[str] = []
    """What sleeps: ``weights``, ``kv_cache``."""
    sleep_level: int = 0


class Ready(_Message):
    """Facts about the engine that clients validate requests with; sent again when they change."""

    pid: int
    model: str
    """The setting."""
    model_path: str
    tokenizer_path: str | None
    vocab_size: int
    max_model_len: int
    num_kv_tokens: int
    """Tokens that the KV cache holds."""
    eos_token_ids: list[int]
    max_logprobs: int
    has_priority: bool
    sampling_defaults: dict[str, Any]
    pooling: Pooling | None
    runner_name: str
    state: EngineState = EngineState()
    computes_on_cpu: bool = False
    settings: dict[str, str] = {}
    """What else outputs depend on, see `fleetfoot.plan.output_settings`."""
    weights: str = ""
    """Identity of the weights in use."""
    weight_version: int = 0
    kv_connector: str | None = None
    """Its name."""
    kv_role: str | None = None
    """Its role, if requests hand KV over with ``kv_transfer_params``; else None."""


class Outputs(_Message):
    """The outputs of a step, for one client."""

    now: float
    """When the tokens arrived, in seconds of the machine's monotonic clock."""
    tokens: list[EngineOutput]
    weight_version: int = 0
    """The version of the weights that sampled the tokens."""


class Refused(_Message):
    """A request that the engine does not accept."""

    number: int
    error: Failed


class Reply(_Message):
    """The result of a call, plain data, or its error."""

    number: int
    value: Any = None
    error: Failed | None = None


class Interruption(_Message):
    """Requests and calls wait, and go on afterwards."""

    reason: str
    """Empty: the end of the interruption."""
    degraded: str = ""
    """Which engines of a group serve nothing now, and why; empty: all serve."""


class Held(_Message):
    """A call begins to run between steps, or has ended."""

    is_held: bool


class Dead(_Message):
    """The engine has failed; its process ends."""

    text: str
    trace: str


ClientMessage = Hello | EngineRequest | Finish | Call | Stop
EngineMessage = Ready | Outputs | Refused | Reply | Interruption | Held | Dead


def encoder() -> msgspec.msgpack.Encoder:
    """An encoder of messages of both sides. Tokens of prompts are the bytes of int32."""
    return msgspec.msgpack.Encoder(enc_hook=array.tobytes)


def decode_as(messages: Any) -> Callable[[bytes], Any]:
    """Decodes `ClientMessage` or `EngineMessage`."""
    return msgspec.msgpack.Decoder(messages, dec_hook=lambda _, content: array("i", content)).decode
