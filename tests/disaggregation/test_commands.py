"""`fleetfoot engine` and `fleetfoot proxy`, as a shell starts them."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.helpers.prefill_decode import engine_settings, generate_all, nixl
from tests.helpers.processes import Watched, running_child

from fleetfoot import AsyncLLM, SamplingParams
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.outputs import RequestOutput
from fleetfoot.server.disaggregation.client import EngineClient
from fleetfoot.server.disaggregation.serve import EngineServer, LocalEngine, reserve

Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:

        def run(*arguments: str) -> subprocess.Popen[str]:
            return stack.enter_context(running_child(sys.executable, "-m", "fleetfoot.cli.main", *arguments))

        yield run


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())["address"])


def test_two_engines_and_a_proxy(command: Command, text_model: Path, expected: dict[str, RequestOutput]) -> None:
    settings = ["--device", "cpu", "--max-num-seqs", "8", "--block-size", "4"]
    engines = [
        command("engine", str(text_model), *settings, "--kv-transfer-config", json.dumps(nixl(role)))
        for role in ("kv_producer", "kv_consumer")
    ]
    prefill, decode = [address_of(process) for process in engines]
    proxy = command("proxy", "--prefill", prefill, "--decode", decode)
    client = EngineClient(address_of(proxy))

    async def everything() -> None:
        outputs = await generate_all(client)
        assert {name: output.outputs[0].token_ids for name, output in outputs.items()} == {
            name: output.outputs[0].token_ids for name, output in expected.items()
        }
        assert await client.drain() == {"num_requests": 5, "num_prefilled": 4, "num_prefills_failed": 0}
        transfers = (await EngineClient(decode).stats())["scheduler"]["transfers"]
        assert transfers["loads_done"] >= 3 and transfers["loads_failed"] == 0

    asyncio.run(everything())
    for process, number in zip((proxy, *engines), (signal.SIGTERM, signal.SIGINT, signal.SIGTERM), strict=True):
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output) == (0, ""), errors
        assert "Traceback" not in errors


def test_invalid_arguments(command: Command) -> None:
    with reserve() as place:
        place.listen()
        port = place.getsockname()[1]
        for arguments, message in [
            (("proxy", "--prefill", "nowhere", "--decode", "127.0.0.1:1"), "'nowhere'; it must be host:port"),
            (("proxy", "--prefill", "127.0.0.1:99999", "--decode", "127.0.0.1:1"), "argument --prefill: address is"),
            (("proxy", "--prefill-timeout", "0"), "--prefill-timeout: 0 is no time to wait"),
            (("engine", f"--port={port}"), f"cannot listen on 127.0.0.1:{port}"),
            (("engine", "--port=99999"), "cannot listen on 127.0.0.1:99999"),
        ]:
            process = command(*arguments)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 2
            assert message in errors


def test_dead_engine_is_reported(text_model: Path) -> None:
    async def everything() -> None:
        llm = AsyncLLM(**engine_settings(text_model, "kv_both", model_runner="v2"))
        deaths: list[EngineDeadError] = []
        server = EngineServer(LocalEngine(llm), on_death=deaths.append)
        await server.start(reserve())
        client = EngineClient(server.address)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="was shut down"):
            await anext(client.generate([5, 6, 7], SamplingParams(), "r"))
        assert len(deaths) == 1
        await server.close()

    asyncio.run(everything())


PARENT = """
import json, signal, sys
from fleetfoot.server.disaggregation.client import EngineProcess

process = EngineProcess(json.loads(sys.argv[1]), environment={"OMP_NUM_THREADS": "1"})
process.wait_until_ready()
print(process.pid, flush=True)
signal.pause()
"""


def test_engine_ends_with_its_killed_parent(text_model: Path) -> None:
    settings = json.dumps(engine_settings(text_model, "kv_both", model_runner="v2"))
    with running_child(sys.executable, "-c", PARENT, settings) as parent:
        assert parent.stdout is not None
        engine = Watched([int(parent.stdout.readline())])
        parent.kill()
        engine.wait()
