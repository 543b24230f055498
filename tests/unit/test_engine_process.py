"""The loop of an engine's process, with an engine that computes nothing."""

import os
import socket
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fleetfoot.engine import process, wire
from fleetfoot.engine.calls import CALLS, EngineCalls
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.local_server import LocalServer, framed
from fleetfoot.engine.remote_calls import RemoteCalls
from fleetfoot.records.sampling_params import SamplingParams


def test_a_batch_of_requests_leaves_time_for_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "output_settings", lambda plan: {})
    monkeypatch.setattr(process, "facts", lambda *arguments, **keywords: MagicMock())
    engine: Any = MagicMock()
    ours, theirs = LocalServer(str(tmp_path / "engine")), socket.socket(socket.AF_UNIX)
    lifeline, end = os.pipe()
    try:
        theirs.connect(str(tmp_path / "engine"))
        assert ours.receive() is None  # the connection is accepted
        server = process.EngineServer(engine, ours, lifeline)
        monkeypatch.setattr(server, "_send", lambda client, message: None)
        encode = wire.encoder().encode
        theirs.send(framed(encode(wire.Hello())))
        for number, flow in enumerate([*["batch"] * 50, "other", "batch"]):
            request = EngineRequest(
                request_id=f"r{number}", prompt=None, prompt_token_ids=array("i", [5]), params=SamplingParams(),
                bad_words_token_ids=[], kv_transfer_params=None, max_tokens=1, priority=0, cache_salt=None,
                arrival_time=0.0, number=number, flow=flow,
            )  # fmt: skip
            theirs.send(framed(encode(request)))
        theirs.send(framed(encode(wire.Finish(49, 0))))

        def added() -> list[int]:
            return [call.args[0].number for call in engine.submit.call_args_list]

        server._receive()
        assert added() == [0, 50, *range(1, process.MOST_ADDED - 1)]  # flows take turns
        server._receive()
        assert len(added()) == 2 * process.MOST_ADDED
        theirs.send(framed(encode(wire.Call(0, "abort_requests", [["r48"]]))))
        server._receive()
        assert added() == [0, 50, *range(1, 49), 51]  # what came before the call, without what has ended
    finally:
        ours.close()
        theirs.close()
        for one in (lifeline, end, server._compiled, server._note_compiled):
            os.close(one)


def test_the_table_of_calls_has_every_call() -> None:
    methods = {name for name in vars(EngineCalls) if not name.startswith("_")} - {"suspension"}
    held = {name for name, row in CALLS.items() if row.runs == "held"}
    assert held == methods | {"bring_to"}  # which the group of engines sends
    of_process = {"drain", "compile_grammar"}  # which wait
    for name in CALLS.keys() - held - of_process:
        assert hasattr(RemoteCalls, name) or hasattr(LLMEngine, name), name
