"""What the engine and its workers tell each other, as bytes.

What every step has, numbers and strings, is msgpack with known types. What only some steps have, new requests with
their parameters and what a KV connector tells its workers, can hold objects of any class: it is pickled. Both sides are
one engine, processes that it started or nodes that have proved that they belong to it (`fleetfoot.executor.nodes`), so
nobody unpickles what a stranger wrote.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import msgspec

from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput

_PICKLED = ("new_requests", "kv_connector_metadata")
_PLAIN = tuple(field.name for field in fields(SchedulerOutput) if field.name not in _PICKLED)
"""The fields of `SchedulerOutput` that are numbers and strings."""

_ENCODER = msgspec.msgpack.Encoder()
_HINTS = get_type_hints(SchedulerOutput)
_STEP_TYPES: Any = tuple.__class_getitem__((int, bytes, *[_HINTS[name] for name in _PLAIN]))
"""Of a message: the step's number; the values of _PICKLED and the grammar's output, pickled, or nothing where they all
are empty; the values of _PLAIN."""
_STEP_DECODER = msgspec.msgpack.Decoder(_STEP_TYPES)


@dataclass(slots=True)
class Step:
    """A step as a worker gets it."""

    number: int
    """Counts all steps of the executor, the idle ones too."""
    scheduler_output: SchedulerOutput
    grammar_output: object | None


def encode_step(number: int, output: SchedulerOutput, grammar_output: object | None = None) -> bytes:
    """The same bytes are sent to every worker."""
    pickled = b""
    if output.new_requests or output.kv_connector_metadata is not None or grammar_output is not None:
        rare = ([getattr(output, name) for name in _PICKLED], grammar_output)
        pickled = pickle.dumps(rare, protocol=pickle.HIGHEST_PROTOCOL)
    return _ENCODER.encode((number, pickled, *[getattr(output, name) for name in _PLAIN]))


def decode_step(message: bytes) -> Step:
    """Undo `encode_step`."""
    number, pickled, *plain = _STEP_DECODER.decode(message)
    output = SchedulerOutput(**dict(zip(_PLAIN, plain, strict=True)))
    grammar_output = None
    if pickled:
        values, grammar_output = pickle.loads(pickled)
        for name, value in zip(_PICKLED, values, strict=True):
            setattr(output, name, value)
    return Step(number, output, grammar_output)


class Ready(msgspec.Struct, array_like=True, tag=True):
    """A worker has loaded its part and can take steps."""

    rank: int
    layout: bytes
    """Its `KVLayout`, pickled."""
    runner_name: str


class Answer(msgspec.Struct, array_like=True, tag=True):
    """What a step yielded on a rank."""

    rank: int
    number: int
    output: ModelRunnerOutput


class Failure(msgspec.Struct, array_like=True, tag=True):
    """A worker has raised; it does nothing any more."""

    rank: int
    text: str
    """Type and message of what it raised."""
    trace: str
    """The traceback, as Python prints it."""
    error: bytes = b""
    """What it raised, pickled; empty if that cannot be."""


Report = Ready | Answer | Failure
_REPORT_DECODER = msgspec.msgpack.Decoder(Report)


def encode_report(report: Report) -> bytes:
    """What a worker says."""
    return _ENCODER.encode(report)


def decode_report(message: bytes) -> Any:
    """Undo `encode_report`."""
    return _REPORT_DECODER.decode(message)


def failure_of(rank: int, error: BaseException, trace: str) -> Failure:
    """Of an exception, which is taken along if it survives being pickled."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        pickled = pickle.dumps(error)
        is_whole = str(pickle.loads(pickled)) == str(error)  # an exception's own constructor may want other arguments
    except Exception:
        is_whole = False
    return Failure(rank, text, trace, pickled if is_whole else b"")
