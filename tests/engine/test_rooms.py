"""Rooms of extensions that are deleted: everything else works, and what needs them says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fleetfoot

PROGRAM = """
import contextlib, io, json
from unittest.mock import MagicMock
from fleetfoot import LLM, SamplingParams
from fleetfoot.cli.main import main
from fleetfoot.server.app import make_endpoints
llm = LLM(device="cpu", max_model_len=64)
(output,) = llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
out, service = io.StringIO(), MagicMock()
service.engine.facts.pooling = None
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
    code = main(["plan", "--device", "cpu", "--model-runner", "v1"])
paths = [endpoint.path for endpoint in make_endpoints(service)]
print(json.dumps([len(output.outputs[0].token_ids), code, out.getvalue(), paths]))
"""


def without(room: str, folder: Path) -> None:
    """The package in ``folder``, with links to all but one of its rooms."""
    source, target, parts = Path(fleetfoot.__file__).parent, folder / "fleetfoot", room.split("/")
    for part in parts:
        target.mkdir()
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__"):
                (target / entry.name).symlink_to(entry)
        source, target = source / part, target / part


@pytest.mark.parametrize(
    ("room", "lost"),
    [
        ("runner/v1", []),
        ("server/anthropic", ["/v1/messages", "/v1/messages/count_tokens"]),
        ("server/pooling", ["/v1/embeddings", "/v1/rerank"]),
        ("server/page", ["/live/events"]),
    ],
)
def test_a_room_that_is_deleted(room: str, lost: list[str], tmp_path: Path) -> None:
    without(room, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    num_tokens, code, printed, paths = json.loads(done.stdout.splitlines()[-1])
    assert num_tokens == 3
    assert (code != 0) == (room == "runner/v1") == ("fleetfoot.runner.v1" in printed)
    apis = {"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank"}
    apis |= {"/live/events"}
    assert apis - {*paths} == {*lost}
