"""Rooms of extensions that are deleted: everything else works, and what needs them says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fleetfoot

LOST = {
    "runner/v1": [],
    "server/anthropic": ["/v1/messages", "/v1/messages/count_tokens"],
    "server/pooling": ["/v1/embeddings", "/v1/rerank"],
    "server/page": ["/live/events", "/live/trace"],
    "server/disaggregation": [],
    "kv_transfer/nixl": [],
    "kernels_hopper": [],
}
"""Each room, and the routes that are gone with it."""
PROGRAM = """
import contextlib, io, json, os, sys
from unittest.mock import MagicMock
import httptools, msgspec, numpy, safetensors, starlette.applications, tokenizers, torch, uvicorn, zmq
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    sys.path.insert(0, folder)
    from fleetfoot import LLM, SamplingParams
    from fleetfoot.cli.main import main
    from fleetfoot.server.app import make_endpoints
    llm = LLM(device="cpu", max_model_len=64)
    (output,) = llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    service = MagicMock()
    service.engine.facts.pooling = None
    asked = {}
    nixl = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    flags_of = {"runner/v1": ["--model-runner", "v1"], "kv_transfer/nixl": ["--kv-transfer-config", nixl]}
    for room, flags in flags_of.items():
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            asked[room] = main(["plan", "--device", "cpu", *flags]), out.getvalue()
    paths = [endpoint.path for endpoint in make_endpoints(service)]
    with open(f"{folder}/found.json", "w") as file:
        json.dump([len(output.outputs[0].token_ids), asked, paths], file)
    os._exit(0)
"""


def without(room: str, folder: Path) -> Path:
    """The package in ``folder``, with links to all but one of its rooms."""
    folder.mkdir()
    source, target, parts = Path(fleetfoot.__file__).parent, folder / "fleetfoot", room.split("/")
    for part in parts:
        target.mkdir()
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__"):
                (target / entry.name).symlink_to(entry)
        source, target = source / part, target / part
    return folder


def test_each_room_is_deleted_in_turn(tmp_path: Path) -> None:
    folders = {room: without(room, tmp_path / room.replace("/", "-")) for room in LOST}
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", PROGRAM, *map(str, folders.values())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    apis = {path for lost in LOST.values() for path in lost} | {"/v1/chat/completions"}
    for room, folder in folders.items():
        assert (folder / "found.json").exists(), f"without {room}: {done.stderr}"
        num_tokens, asked, paths = json.loads((folder / "found.json").read_text())
        assert num_tokens == 3
        assert apis - {*paths} == {*LOST[room]}
        for needed, (code, printed) in asked.items():
            assert (code != 0) == (room == needed), printed
            assert room != needed or f"fleetfoot.{room.replace('/', '.')}" in printed
