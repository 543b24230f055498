"""The life of a server: signals, several API servers, sockets, TLS, keys, and an engine that ends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from fleetfoot.assets import embedded_model_path
from fleetfoot.cli.main import main
from tests.helpers import zygote
from tests.helpers.processes import Watched
from tests.helpers.server import RunningServer

BODY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
FLAGS = ("--dtype", "float32")


def generate(url: str, max_tokens: int, headers: Any = None, **fields: Any) -> httpx.Response:
    body = {**BODY, "max_tokens": max_tokens, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def begun_stream(url: str, pool: ThreadPoolExecutor, max_tokens: int) -> Future[list[str]]:
    """A long request in another thread. Returns when its first data has come."""
    client = httpx.Client(timeout=60)
    stream = client.stream("POST", f"{url}/v1/completions", json={**BODY, "max_tokens": max_tokens, "stream": True})
    response = stream.__enter__()
    lines = response.iter_lines()
    first = next(lines)

    def read() -> list[str]:
        with contextlib.closing(client):
            content = [first, *lines]
            stream.__exit__(None, None, None)
            return content

    return pool.submit(read)


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(2) as made:
        yield made


def test_sigterm_lets_requests_end(pool: ThreadPoolExecutor) -> None:
    with RunningServer(*FLAGS) as server:
        rest = begun_stream(server.url, pool, 300)
        assert server.stop(signal.SIGTERM) == 0
        lines = rest.result()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert json.loads(lines[-4].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_requests_end_with_the_time_of_a_shutdown(pool: ThreadPoolExecutor) -> None:
    with RunningServer(*FLAGS, "--shutdown-timeout", "0") as server:
        rest = begun_stream(server.url, pool, 2000)
        assert server.stop(signal.SIGTERM) == 0
        lines = rest.result()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert "time for unfinished requests is over" in json.loads(lines[-4].removeprefix("data: "))["error"]["message"]
    assert not any("Traceback" in line for line in server.log)


def test_a_second_sigterm_aborts(pool: ThreadPoolExecutor) -> None:
    with RunningServer(*FLAGS) as server:
        rest = begun_stream(server.url, pool, 2000)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.HTTPError):  # it accepts no more, so the first signal has been taken in
            while True:
                generate(server.url, 1)
        assert server.stop(signal.SIGTERM) == 0
        assert "error" in "".join(rest.result())


def test_an_interrupt_aborts_and_logs_are_json(pool: ThreadPoolExecutor) -> None:
    with RunningServer(*FLAGS, "--log-format", "json", "--access-log") as server:
        generate(server.url, 1, headers={"X-Request-Id": "mine"})
        httpx.get(f'{server.url}/no where%0a"%20', headers={"X-Request-Id": "odd"})
        rest = begun_stream(server.url, pool, 2000)
        assert server.stop(signal.SIGINT) == 130
        assert "error" in "".join(rest.result())
    records = [json.loads(line) for line in server.log]
    messages = [record["message"] for record in records]
    (access,) = [record["message"] for record in records if record.get("request_id") == "mine"]
    assert access.startswith("127.0.0.1 POST /v1/completions 200 ")
    (odd,) = [record["message"] for record in records if record.get("request_id") == "odd"]
    assert odd.startswith("127.0.0.1 GET /no%20where%0A%22%20 404 ")
    assert any(message.startswith("weights: ") for message in messages)
    assert any("listening on http://127.0.0.1:" in message for message in messages)


def test_several_api_servers(pool: ThreadPoolExecutor) -> None:
    with RunningServer(*FLAGS, "--api-server-count", "2", is_forked=False) as server:
        texts = {generate(server.url, 6).json()["choices"][0]["text"] for _ in range(4)}
        assert len(texts) == 1
        with contextlib.ExitStack() as stack:  # each takes its share, whichever of them is awake
            clients = [stack.enter_context(httpx.Client(timeout=60)) for _ in range(6)]
            assert {client.get(f"{server.url}/ready").status_code for client in clients} == {200}
            assert sorted(map(num_connections, children(server.process.pid))) == [0, 3, 3]  # 0: the engine's process
            body: dict[str, Any] = {"input": "Hello", "max_output_tokens": 2}
            for client in clients:
                answer = client.post(f"{server.url}/v1/responses", json=body)
                assert answer.status_code == 200
                body["previous_response_id"] = answer.json()["id"]
        rest = begun_stream(server.url, pool, 150)
        assert server.stop(signal.SIGTERM) == 0
        assert rest.result()[-2] == "data: [DONE]"


def num_connections(pid: int) -> int:
    """Established TCP connections of a process."""
    established = {
        line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "01"
    }
    sockets = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            sockets.append(os.readlink(entry))
    return sum(name.removeprefix("socket:[").removesuffix("]") in established for name in sockets)


def test_requests_end_with_their_engine(pool: ThreadPoolExecutor) -> None:
    with RunningServer(*FLAGS, "--api-server-count", "2") as server:
        rest = begun_stream(server.url, pool, 2000)
        os.kill(engine_of(server), signal.SIGKILL)
        assert server.wait() == 1
        error = json.loads(rest.result()[-4].removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("the engine's process has ended with code -9", "engine_dead")


def test_api_servers_that_are_killed_are_replaced(pool: ThreadPoolExecutor) -> None:
    """A stream of the other one goes on. Then that one is killed too: a request waits until one is ready again."""
    with RunningServer(*FLAGS, "--api-server-count", "2") as server:
        expected = text_of(begun_stream(server.url, pool, 1000).result())
        first, second = (pid for pid in children(server.process.pid) if name_of(pid) != "engine.process")
        streams: dict[int, Future[list[str]]] = {}
        while len(streams) < 2:  # connections alternate
            before = {pid: num_connections(pid) for pid in (first, second)}
            stream = begun_stream(server.url, pool, 1000)  # which goes on when its server is killed
            streams |= {pid: stream for pid in (first, second) if num_connections(pid) > before[pid]}
        os.kill(first, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            streams[first].result()
        assert text_of(streams[second].result()) == expected
        killed = Watched([second])
        killed.kill(second)
        killed.wait()  # until then it may still be passed a connection, which ends with it
        assert generate(server.url, 1000).json()["choices"][0]["text"] == expected
        assert server.stop() == 0
    assert sum("is started again" in line for line in server.log) == 2


def text_of(lines: list[str]) -> str:
    """The text of a stream."""
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


RESUMED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3, "logprobs": 1},
    "copies": {"temperature": 0.9, "seed": 4, "n": 3},
    "structured": {
        "structured_outputs": {"regex": "([a-z]{3} ){60}"},
        "temperature": 0.9,
        "seed": 5,
        "ignore_eos": False,
    },
}


def test_requests_go_on_in_another_process_of_the_engine() -> None:
    """No token twice, none left out: greedy and sampled, several sequences, under a grammar."""
    flags = (*FLAGS, "--on-error", "restart", "--max-restarts", "1", "--api-server-count", "2")
    with RunningServer(*flags) as server, ThreadPoolExecutor(16) as many:

        def choices(name: str, begun: threading.Barrier) -> dict[int, list[Any]]:
            body = {**BODY, "max_tokens": 240, **RESUMED[name], "return_token_ids": True, "stream": True}
            found: dict[int, list[Any]] = {}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
                for number, line in enumerate(response.iter_lines()):
                    if number == 0:
                        begun.wait()
                    for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                        so_far = found.setdefault(choice["index"], ["", [], None])
                        so_far[0] += choice["text"]
                        so_far[1] += choice["token_ids"] or []
                        so_far[2] = choice["finish_reason"]
            return found

        def run(after: Callable[[], object]) -> list[dict[int, list[Any]]]:
            begun = threading.Barrier(len(RESUMED) + 1)
            tasks = [many.submit(choices, name, begun) for name in RESUMED]
            begun.wait()
            after()
            return [task.result() for task in tasks]

        expected = run(lambda: None)
        assert run(lambda: os.kill(engine_of(server), signal.SIGKILL)) == expected
        assert httpx.get(f"{server.url}/health", timeout=60).json() == {"status": "ok"}
        rest = begun_stream(server.url, many, 2000)
        os.kill(engine_of(server), signal.SIGKILL)
        assert server.wait() == 1
        message = json.loads(rest.result()[-4].removeprefix("data: "))["error"]["message"]
    cause = "the engine's process has ended with code -9"
    assert message == f"{cause}; it was started again 1 times within an hour, the most (max_restarts)"


def test_a_replica_that_is_lost_is_replaced() -> None:
    """Its requests continue on the other one. Then that one is lost too."""
    with RunningServer(*FLAGS, "--data-parallel-size", "2") as server, ThreadPoolExecutor(4) as many:
        ranks = [generate(server.url, 1, {"X-data-parallel-rank": str(rank)}).status_code for rank in range(3)]
        assert ranks == [200, 200, 400]
        expected = generate(server.url, 250).json()["choices"][0]["text"]
        for lost in engines_of(server):
            streams = [begun_stream(server.url, many, 250) for _ in range(3)]
            os.kill(lost, signal.SIGKILL)
            assert [text_of(stream.result()) for stream in streams] == [expected] * 3
        found = httpx.get(f"{server.url}/metrics", timeout=60).text
        assert 'engine="replica-' in found
        assert server.stop() == 0
    assert sum("it is started again" in line for line in server.log) == 2


def test_another_process_of_the_engine_is_what_calls_have_made_of_it(tmp_path: Path) -> None:
    """With two API servers, of which each has handled some of the calls. Weights of no folder end the service."""
    folder = tmp_path / "other"
    shutil.copytree(embedded_model_path(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    flags = ("--on-error", "restart", "--enable-admin-routes", "--admin-key", "admin", "--enable-sleep-mode")
    with RunningServer(*FLAGS, *flags, "--api-server-count", "2") as server, ThreadPoolExecutor(1) as pool:

        def post(path: str, **fields: Any) -> dict[str, Any]:
            headers = {"Authorization": "Bearer admin"}
            found: dict[str, Any] = httpx.post(server.url + path, json=fields, headers=headers, timeout=60).json()
            return found

        def killed() -> dict[str, Any]:
            """The state of the next process."""
            end = os.pidfd_open(engine_of(server))
            signal.pidfd_send_signal(end, signal.SIGKILL)
            select.select([end], [], [])
            os.close(end)
            while "error" in (found := post("/abort_requests", request_ids=[])):  # until it is ready
                pass
            return {name: found[name] for name in ("is_paused", "is_sleeping", "weight_version")}

        post("/update_weights", weights_path=str(folder), weight_version=5)
        changed = post("/update_config", overrides={"max_logprobs": 0, "override_generation_config": {"top_k": 1}})
        assert changed["weight_version"] == 5
        expected = generate(server.url, 24).json()["choices"]
        assert killed() == {"is_paused": False, "is_sleeping": False, "weight_version": 5}
        assert generate(server.url, 24).json()["choices"] == expected
        assert generate(server.url, 1, logprobs=1).status_code == 400
        for begin, end in (("/pause", "/resume"), ("/sleep?level=2", "/wake_up")):
            post(begin)
            waiting = pool.submit(generate, server.url, 24)
            assert killed() == {"is_paused": True, "is_sleeping": begin != "/pause", "weight_version": 5}
            assert not waiting.done()
            post(end)
            assert waiting.result().json()["choices"] == expected
        patch = {"name": "model.norm.weight", "indices": [0], "values": [1.0]}
        assert post("/update_weights", patches=[patch])["weight_version"] == 6
        os.kill(engine_of(server), signal.SIGKILL)
        assert server.wait() == 1
    assert "its weights of version 6 were given as tensors or patches" in "".join(server.log)


def test_no_process_outlives_a_killed_server() -> None:
    with RunningServer(*FLAGS, "--api-server-count", "2") as server:
        pids = children(server.process.pid)
        assert len(pids) == 3
        handles = [os.pidfd_open(pid) for pid in pids]
        server.process.kill()
        server.wait()
        for handle in handles:
            assert select.select([handle], [], [], 60)[0]
            os.close(handle)


def engine_of(server: RunningServer) -> int:
    """The engine's process."""
    return engines_of(server)[0]


def engines_of(server: RunningServer) -> list[int]:
    return [pid for pid in children(server.process.pid) if name_of(pid) == "engine.process"]


def children(pid: int) -> list[int]:
    """The child processes, without the zygote of a forked server."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [pid for pid in pids if name_of(pid) != zygote.NAME]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_a_unix_socket_and_an_engine_that_ends(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with RunningServer(*FLAGS, "--uds", path) as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://server") as client:
            assert client.get("/health").json() == {"status": "ok"}
        (engine,) = children(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        assert server.wait() == 1
        assert "has ended with code -9" in "".join(server.log)
    assert not os.path.exists(path)


def test_a_second_server_does_not_take_the_socket_of_a_live_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "socket")
    with (
        RunningServer(*FLAGS, "--uds", path) as server,
        httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://server") as client,
    ):
        assert main(["serve", "--uds", path]) == 2
        assert f"cannot listen on {path} (another server has this socket" in capsys.readouterr().err
        assert client.get("/ping").json() == client.post("/ping").json() == {"status": "ok"}
        server.process.kill()
        server.wait()
    with RunningServer(*FLAGS, "--uds", path) as server:  # the one that was left is replaced
        assert server.stop() == 0


def test_connections_beyond_the_limit_of_files_wait() -> None:
    command = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96)); "
    command += "from fleetfoot.__main__ import run; sys.exit(run())"
    with RunningServer(*FLAGS, program=("-c", command)) as server:
        assert any("may open 96 files (ulimit -Hn)" in line for line in server.log)
        address = httpx.URL(server.url)
        idle = [socket.create_connection((address.host, address.port)) for _ in range(96)]
        with socket.create_connection((address.host, address.port)) as last:
            last.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            server.wait_for("connections cannot be accepted, and wait: ")
            for one in idle:
                one.close()
            assert last.recv(4096).startswith(b"HTTP/1.1 200")
        assert server.stop() == 0
    assert sum("connections cannot be accepted" in line for line in server.log) == 1


def test_a_service_manager_is_notified(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(60)
        manager.bind(str(tmp_path / "notify"))
        with RunningServer(*FLAGS, env={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as server:
            assert manager.recv(4096) == b"STATUS=loading the model"
            assert manager.recv(4096).decode() == f"READY=1\nSTATUS=listening on {server.url}"
            assert server.stop() == 0
            assert manager.recv(4096).startswith(b"STOPPING=1\nSTATUS=")
        assert "\x1b" not in "".join(server.log)  # no bar without a terminal


def test_a_bar_is_shown_on_a_terminal() -> None:
    terminal, other_end = pty.openpty()
    command = [sys.executable, "-m", "fleetfoot", "serve", "--port", "0", *FLAGS]
    environment = {**os.environ, "TERM": "xterm"}
    with zygote.ForkedPopen(command, stderr=other_end, env=environment, start_new_session=True) as process:
        os.close(other_end)
        shown = ""
        while "listening on" not in shown:
            shown += os.read(terminal, 4096).decode(errors="replace")
        process.terminate()
    os.close(terminal)
    assert process.returncode == 0
    assert "━" in shown and re.search(r"weights.*━", shown) and "weights: " in shown
    assert "\x1b[" not in shown.rpartition("ready after")[2]


def test_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        certificate,
        *subject,
    ]
    subprocess.run(command, check=True, capture_output=True)
    with RunningServer(*FLAGS, "--ssl-keyfile", key, "--ssl-certfile", certificate) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        assert httpx.get(f"{server.url}/health", verify=context).status_code == 200
    for keyfile in (certificate, __file__):
        flags = ["--ssl-keyfile", keyfile, "--ssl-certfile", certificate, "--ssl-ca-certs", certificate]
        assert main(["serve", *flags]) == 2
        assert f"ssl_keyfile is '{keyfile}', which has no key for the certificate" in capsys.readouterr().err
    encrypted = [*command[:5], "-passout", "pass:a", *command[6:]]
    subprocess.run(encrypted, check=True, capture_output=True)
    assert main(["serve", "--ssl-keyfile", key, "--ssl-certfile", certificate]) == 2
    assert "it needs a password" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--served-model-name", "story", ""], "--served-model-name is ['story', '']"),
        (["--port", "70000"], "70000"),
        (["--port", "http"], "'http' is no port; it must be an integer in [0, 65535]"),
        (["--max-queue", "0"], "at least 1"),
        (["--max-queue", "many"], "'many' is no integer of at least 1"),
        (["--shutdown-timeout", "long"], "'long' is no number of seconds"),
        (["--shutdown-timeout", "-1"], "'-1' is no number of seconds"),
        (["--ssl-keyfile", __file__], "ssl_keyfile need ssl_certfile"),
        (["--ssl-keyfile", "/nothing.pem"], "ssl_keyfile is '/nothing.pem', which cannot be read: No such file"),
        (["--ssl-certfile", "/nothing.pem"], "ssl_certfile is '/nothing.pem', which cannot be read: No such file"),
        (["--ssl-certfile", __file__], "has no certificate that can be used"),
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
        (["--chat-template", "/nothing.jinja"], "--chat-template /nothing.jinja"),
        (["--chat-template", "/no/template"], "--chat-template /no/template: [Errno 2]"),
        (["--chat-template", __file__.replace("test_serving", "__init__")], "the file has no Jinja"),
        (["--chat-template", "{{ bad"], "--chat-template, its value: the chat template is not valid Jinja, line 1"),
        (["--api-key", ""], "--api-key"),
        (["--allow-credentials"], "need --allowed-origins"),
        (["--allowed-origins", "[1]"], "no list of names"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["serve", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("num_api_servers", [1, 2])
def test_an_engine_that_does_not_start(num_api_servers: int) -> None:
    flags = ("--tensor-parallel-size", "3", "--api-server-count", str(num_api_servers))
    with RunningServer(*flags, *FLAGS) as server:
        assert server.wait() == 2
    assert "tensor" in "".join(server.log)


@pytest.mark.parametrize("num_api_servers", [1, 2])
def test_a_chat_template_that_the_model_does_not_have(num_api_servers: int) -> None:
    with RunningServer("--chat-template", "tools", "--api-server-count", str(num_api_servers), *FLAGS) as server:
        assert server.wait() == 2
    assert "--chat-template tools is neither a file nor a template of the model's (default)" in "".join(server.log)


def test_strict_schemas_and_a_regex_that_becomes_too_large() -> None:
    with RunningServer(*FLAGS, "--strict-schemas") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        schema = {"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object"}
        body = {"prompt": "Once", "max_tokens": 40, "temperature": 2, "seed": 1, "n": 8}
        for fields in ({"guided_json": schema}, {"structured_outputs": {"json": json.dumps(schema)}}):
            answer = client.post("/v1/completions", json={**body, **fields}).json()
            assert [json.loads(choice["text"]) for choice in answer["choices"]] == [{"a": 1}] * 8
        large = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "guided_regex": "((a{1,100}){1,100}){1,100}"}
        answer = client.post("/v1/completions", json=large)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        stream = client.post("/v1/completions", json={**large, "stream": True})
        end = json.loads(stream.text.split("data: ")[-2])
        assert (stream.status_code, end["error"]["type"]) == (200, "invalid_request_error")
        assert client.post("/v1/completions", json=body).status_code == 200
