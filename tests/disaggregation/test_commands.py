"""`fleetfoot engine` and `fleetfoot proxy`, as a shell starts them."""

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import zmq
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import TEXT_MODEL
from tests.helpers.prefill_decode import PROMPTS, client_of, last_output, nixl
from tests.helpers.processes import running_child
from tests.helpers.server import RunningServer
from tests.helpers.streams import async_test

from fleetfoot import SamplingParams
from fleetfoot.server.engine_group import EngineGroup
from fleetfoot.utils.cluster_key import ClusterKey, create_cluster_key

Command = Callable[..., "subprocess.Popen[str]"]
KEY = ClusterKey(b"a key between us")
PROMPT = "Once upon a time there was a little house in the woods, and in it lived an old woman"
BODY: dict[str, Any] = {
    "model": "story", "prompt": PROMPT, "temperature": 0, "max_tokens": 150, "logprobs": 1, "stream": True,
    "extra_body": {"ignore_eos": True},
}  # fmt: skip


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    monkeypatch.setenv("FLEETFOOT_CLUSTER_KEY", KEY.secret.decode())
    with ExitStack() as stack:

        def run(*arguments: str) -> subprocess.Popen[str]:
            return stack.enter_context(running_child(sys.executable, "-m", "fleetfoot.cli.main", *arguments))

        yield run


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())["address"])


def restart(command: Command, address: str, role: str) -> subprocess.Popen[str]:
    return command("engine", "--port", address.rpartition(":")[2], *engine_flags(role))


def engine_flags(role: str) -> list[str]:
    return ["--dtype", "float32", "--device", "cpu", "--kv-transfer-config", json.dumps(nixl(role))]


def collected(stream: Any) -> dict[int, tuple[str, list[float], str | None]]:
    """Text, logprobs and finish reason of each choice."""
    found: dict[int, tuple[str, list[float], str | None]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            text, logprobs, _ = found.get(choice.index, ("", [], None))
            values = [] if choice.logprobs is None else choice.logprobs.token_logprobs
            found[choice.index] = text + choice.text, [*logprobs, *values], choice.finish_reason
    return found


def test_engines_are_killed_behind_a_proxy(command: Command) -> None:
    """Streams go on with the tokens of one engine; an engine that comes back is used again."""
    prefill, decode = (command("engine", *engine_flags(role)) for role in ("kv_producer", "kv_consumer"))
    addresses = address_of(prefill), address_of(decode)
    flags = ("--prefill", addresses[0], "--decode", addresses[1], "--served-model-name", "story", "--api-key", "secret")
    with (
        RunningServer(*flags, command="proxy") as proxy,
        openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="secret", max_retries=0) as api,
    ):
        expected = collected(api.completions.create(**BODY))
        several = {**BODY, "n": 2, "seed": 7, "temperature": 0.9}
        expected_several = collected(api.completions.create(**several))
        assert expected[0][2] == "length" and expected_several[0] != expected_several[1]
        streams = [api.completions.create(**body) for body in (BODY, several)]
        begun = [[next(stream)] for stream in streams]
        decode.kill()  # the prefill engine takes over
        found = [collected([*first, *stream]) for first, stream in zip(begun, streams, strict=True)]
        for ours, theirs in zip(found, (expected, expected_several), strict=True):
            for index, (text, logprobs, reason) in ours.items():
                assert (text, reason) == (theirs[index][0], "length")
                assert logprobs == pytest.approx(theirs[index][1], abs=1e-4)
        assert httpx.get(f"{proxy.url}/health").status_code == 200
        decode = restart(command, addresses[1], "kv_consumer")
        assert address_of(decode) == addresses[1]
        while "decode-0" not in proxy.stats():  # until it is connected
            pass
        stream = api.completions.create(**BODY)
        first = next(stream)
        prefill.kill()
        assert collected([first, *stream])[0][0] == expected[0][0]
        again = collected(api.completions.create(**BODY))[0]
        assert again[0] == expected[0][0]
        metrics = proxy.stats()
        assert 'fleetfoot:proxy_requests_resumed_total{engine="proxy",model_name="story"} 2.0' in metrics
        assert 'fleetfoot:proxy_prefills_failed_total{engine="proxy",model_name="story"}' in metrics
        assert proxy.stop(signal.SIGTERM) == 0
    decode.send_signal(signal.SIGTERM)
    output, errors = decode.communicate(timeout=60)
    assert (decode.returncode, output) == (0, ""), errors
    assert "Traceback" not in errors


def serving(command: Command, model: Path, *flags: str) -> tuple["subprocess.Popen[str]", str]:
    """An engine without a connector, and its address."""
    process = command("engine", str(model), "--dtype", "float32", "--device", "cpu", "--block-size", "4", *flags)
    return process, address_of(process)


@async_test
async def test_an_engine_that_comes_back_with_earlier_weights(
    command: Command, text_model: Path, tmp_path: Path
) -> None:
    """After an update of all, each answer is of the new weights, whatever a restarted engine has."""
    make_checkpoint(tmp_path, "llama", **TEXT_MODEL, seed=1)
    (first, one), (_, two) = (serving(command, text_model) for _ in range(2))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async with client_of(EngineGroup((), (f"tcp://{one}", f"tcp://{two}"), key=KEY)) as client:

        async def answers(name: str) -> set[tuple[int, ...]]:
            outputs = [last_output(client, PROMPTS["long"], params, f"{name} {number}") for number in range(8)]
            return {(output.weight_version, *output.outputs[0].token_ids) for output in await asyncio.gather(*outputs)}

        (old,) = await answers("old")
        await client.call("reload_weights", str(tmp_path), weight_version=5)
        (new,) = await answers("new")
        assert (old[0], new[0]) == (0, 5) and old[1:] != new[1:]
        first.kill()
        again = command(
            *("engine", str(text_model), "--dtype", "float32", "--device", "cpu", "--block-size", "4"),
            *("--port", one.rpartition(":")[2]),
        )
        link: Any = client._link
        engine = link._engines[0]
        while engine.link is None or engine.facts.weight_version < 5:  # until it has come, and has caught up
            assert await answers("meanwhile") == {new}
        assert address_of(again) == one and engine.is_usable
        assert await answers("again") == {new}


@async_test
async def test_engines_that_differ(command: Command, text_model: Path, tmp_path: Path) -> None:
    """The proxy does not start, and names both sides."""
    shutil.copytree(text_model, tmp_path, dirs_exist_ok=True)
    make_checkpoint(tmp_path, "llama", **TEXT_MODEL, seed=1)
    addresses = [
        serving(command, model, *flags)[1]
        for model, flags in ((text_model, ()), (tmp_path, ()), (text_model, ("--max-model-len", "64")))
    ]
    for other, what in ((1, "weights is '"), (2, "max_model_len is ")):
        group = EngineGroup((), (f"tcp://{addresses[0]}", f"tcp://{addresses[other]}"), key=KEY)
        with pytest.raises(ValueError, match="would answer differently") as raised:
            async with client_of(group):
                pass
        text = str(raised.value)
        assert f"differently: {what}" in text and text.count("; ") == 1
        assert all(f"at tcp://{addresses[index]} (" in text for index in (0, other))


def test_prefill_by_a_connector_of_files(command: Command, text_model: Path, tmp_path: Path) -> None:
    """It never hands KV to another engine: the proxy ends with the reason."""
    files = {"shared_storage_path": str(tmp_path)}
    config = {"kv_connector": "SharedStorageConnector", "kv_role": "kv_both", "kv_connector_extra_config": files}
    _, address = serving(command, text_model, "--kv-transfer-config", json.dumps(config))
    with RunningServer("--prefill", address, "--decode", address, command="proxy") as proxy:
        assert proxy.wait() == 2
    # of the two clients of the one engine, whichever it answers first
    assert re.search("never (hands|takes) over KV: its kv_connector is 'SharedStorageConnector'", "".join(proxy.log))


def test_keys_and_data_that_is_no_message(command: Command, tmp_path: Path) -> None:
    engine = command("engine", *engine_flags("kv_both"))
    address = address_of(engine)
    create_cluster_key(tmp_path / "wrong")
    flags = ("--prefill", address, "--decode", address, "--cluster-key-file", str(tmp_path / "wrong"))
    with RunningServer(*flags, command="proxy") as proxy:
        assert proxy.wait() == 2
    assert f"the engine at tcp://{address} has another cluster key" in "".join(proxy.log)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{address}")
        stranger.send_multipart([b"many", b"frames"])
        stranger.send(b"no message")
        stranger.send(b"\x91\xa4Stop")
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    flags = ("--decode", address, "--api-server-count", "2")
    with RunningServer(*flags, command="proxy") as proxy:
        answers = [httpx.post(f"{proxy.url}/v1/completions", json={"prompt": PROMPT}, timeout=60) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4


def test_invalid_arguments(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
        for arguments, message in [
            (("proxy", "--prefill", "nowhere", "--decode", "127.0.0.1:1"), "'nowhere'; it must be host:port"),
            (("proxy", "--prefill", "127.0.0.1:99999", "--decode", "127.0.0.1:1"), "argument --prefill: address is"),
            (("proxy", "--prefill-timeout", "0"), "--prefill-timeout: '0' is no number above 0"),
            (("engine", f"--port={port}"), f"cannot listen on 127.0.0.1:{port}"),
            (("engine", "--port=99999"), "cannot listen on 127.0.0.1:99999"),
        ]:
            process = command(*arguments)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 2
            assert message in errors
