"""`fleetfoot bench serve` against servers that answer at once: what it sends, what it measures, what it draws."""

import asyncio
import json
import math
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fleetfoot.cli.bench_client import Conversation, Load, Sample, Turn, _Client
from fleetfoot.cli.bench_load import Lengths
from fleetfoot.cli.bench_serve import Outcome, Shape, read_trace, results
from fleetfoot.cli.command import UsageError
from fleetfoot.cli.drawing import Chart, Curve, draw
from fleetfoot.cli.main import main

SHAPE = Shape(Lengths(6, 9), Lengths(3, 3), prefix_len=4, num_prefixes=2)
DRAFTS = {
    'drafts_total{engine="0"}': 2,
    'draft_tokens_total{engine="0"}': 6,
    'accepted_tokens_total{engine="0"}': 3,
    'accepted_tokens_per_pos_total{engine="0",position="0"}': 2,
    'accepted_tokens_per_pos_total{engine="0",position="1"}': 1,
}
"""What the server's metrics count of each request."""
VLLM_KEYS = """
date endpoint_type tokenizer_id rtfx
backend label model_id num_prompts request_rate burstiness max_concurrency duration completed failed
total_input_tokens total_output_tokens request_throughput request_goodput output_throughput total_token_throughput
max_output_tokens_per_s max_concurrent_requests
mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms
p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms
""".split()  # noqa: SIM905


class OpenAI(ThreadingHTTPServer):
    """Streams the tokens that a request asks for, in pieces that end anywhere; keeps bodies and headers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.profiles: list[tuple[str, str, int]] = []
        self.fails_after = math.inf
        self.is_asked, self.delay_s = threading.Event(), 0.0
        self.streams: list[list[Any]] = []
        """Events of the next requests, in place of the tokens that were asked for."""
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OpenAI

    def do_GET(self) -> None:
        if self.path == "/metrics":
            counts = {name: size * len(self.server.bodies) for name, size in DRAFTS.items()}
            self._send(200, "".join(f"vllm:spec_decode_num_{one} {size}\n" for one, size in counts.items()).encode())
        else:
            self._send(200, b'{"data": [{"id": "some-model"}]}')

    def do_POST(self) -> None:
        if self.path.endswith("_profile"):
            self.server.profiles.append((self.path, self.headers["Authorization"], len(self.server.bodies)))
            self._send(200, b'{"files": ["a.json"]}' if self.path.startswith("/stop") else b"")
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.headers.append(dict(self.headers))
        self.server.is_asked.set()
        time.sleep(self.server.delay_s)
        if len(self.server.bodies) > self.server.fails_after:
            self._send(503, b'{"error": {"message": "too much"}}')
            return
        is_chat, count = "messages" in body, body["max_tokens"]
        events: list[Any] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] if is_chat else []
        texts = [f" {number}" for number in range(count)]
        events += [{"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]} for text in texts]
        usage = {"prompt_tokens": 7, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}
        events.append({"choices": [], "usage": usage})
        events = self.server.streams.pop(0) if self.server.streams else events
        stream = b"".join(b"data: " + json.dumps(one, separators=(",", ":")).encode() + b"\n\n" for one in events)
        stream += b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for begin in range(0, len(stream), 37):
            part = stream[begin : begin + 37]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[OpenAI]:
    with OpenAI() as running:
        yield running
        running.shutdown()


def bench(server: OpenAI, *flags: str) -> list[str]:
    return ["bench", "serve", "--base-url", server.url, "--num-warmup", "1", "--output-len", "5", *flags]


def test_several_loads_are_a_line_each_with_the_keys_of_vllm(
    server: OpenAI, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = "--max-concurrency", "1,4", "--num-prompts", "6", "--client-processes", "2", "--target-key", "secret"
    goodput = "--goodput", "ttft:60000", "e2el:0.001"
    assert main(bench(server, *flags, *goodput, "--plot", str(tmp_path / "load.svg"))) == 0
    points = [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]
    assert [point["max_concurrency"] for point in points] == [1, 4]
    for point in points:
        assert [name for name in VLLM_KEYS if name not in point] == []
        assert (point["completed"], point["failed"], point["request_goodput"]) == (6, 0, 0.0)
        assert (point["total_input_tokens"], point["total_output_tokens"], point["total_cached_tokens"]) == (42, 30, 12)
        assert point["events_per_token"] == 1.0 and point["p99_client_queue_time_ms"] == 0.0
        assert {name.removeprefix("spec_decode_"): point[name] for name in point if name.startswith("spec_")} == {
            "acceptance_rate": 50.0,
            "acceptance_length": 2.5,
            "num_drafts": 12,
            "draft_tokens": 36,
            "accepted_tokens": 18,
            "per_position_acceptance_rates": [1.0, 0.5],
        }
        assert 0 < point["median_ttft_ms"] <= point["p99_ttft_ms"] <= point["p99_e2el_ms"]
        assert point["max_concurrent_requests"] <= point["max_concurrency"]
    assert len(server.bodies) == 1 + 2 * 6
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert {body["model"] for body in server.bodies} == {"some-model"}
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 1 + 2 * 6  # no load finds another's in a cache
    drawn = ElementTree.parse(tmp_path / "load.svg")
    texts = {element.text for element in drawn.iter() if element.tag.endswith("text")}
    assert {"p99", "some-model, fleetfoot", "latency, ms"} <= texts


def test_a_profile_and_the_tails_of_one_load(server: OpenAI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLEETFOOT_ADMIN_KEY", "admin")
    flags = "--profile", "--num-prompts", "2", "--burstiness", "0.5", "--request-rate", "900"
    assert main(bench(server, *flags, "--plot", str(tmp_path / "tails.svg"))) == 0
    drawn = ElementTree.parse(tmp_path / "tails.svg")
    assert {"time to first token", "50%"} <= {one.text for one in drawn.iter() if one.tag.endswith("text")}
    assert server.profiles == [("/start_profile", "Bearer admin", 0), ("/stop_profile", "Bearer admin", 3)]


def test_turns_of_a_conversation_have_what_was_said_before(server: OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--endpoint", "chat", "--turns", "3", "--num-prompts", "2", "--request-rate", "1000", "--save-detailed"
    assert main(bench(server, *flags, "--model", "other")) == 0
    assert {body["model"] for body in server.bodies} == {"other"}
    output, status = capsys.readouterr()
    content = json.loads(output)
    assert content["short_outputs"] == 0 and "--allow-eos" not in status
    assert (content["completed"], content["output_lens"], content["backend"]) == (6, [5] * 6, "openai-chat")
    assert [len(gaps) for gaps in content["itls"]] == [4] * 6
    assert content["errors"] == [""] * 6 and len(content["latencies"]) == len(content["queue_times"]) == 6
    conversations: dict[str, list[Any]] = {}
    for body in server.bodies[3:]:  # those after the warm-up
        conversations.setdefault(body["messages"][0]["content"], []).append(body["messages"])
    assert len(conversations) == 2
    for turns in conversations.values():
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
            assert after[len(before)] == {"role": "assistant", "content": " 0 1 2 3 4"}
        assert [len(messages) for messages in turns] == [1, 3, 5]


def test_failures_are_counted_with_their_reasons(server: OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    server.fails_after = 3
    assert main(bench(server, "--num-prompts", "5", "--max-concurrency", "1")) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["completed"], content["failed"], list(content["error_counts"].values())) == (2, 3, [3])
    server.fails_after = 0
    assert main(bench(server)) == 2  # the warm-up fails


ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


ENDS = {"choices": [{"text": "", "finish_reason": "stop"}]}
USED = {"prompt_tokens": 7, "completion_tokens": 5}
STREAMS: list[tuple[list[Any], int | None]] = [
    ([ENDS], 1),
    ([ROLE, {"choices": [{"delta": {}, "finish_reason": "length"}]}], 1),
    ([ROLE, {"choices": [], "usage": {"completion_tokens": 3}}], 3),
    ([ENDS, {"choices": [], "usage": {"completion_tokens": 0}}], 0),
    ([ROLE], None),
    ([ROLE, {"choices": [], "usage": {"completion_tokens": 0}}], None),
    ([{"choices": [{"text": "a"}]}, {"error": {"message": "lost"}}], None),
    ([{"choices": [{"text": "a"}]}, {"id": 1, "error": {"message": "lost"}, "choices": [], "usage": USED}], None),
    ([{"choices": [{"text": "a"}]}, {"object": "error", "message": "lost"}, {"choices": [], "usage": USED}], None),
    ([{"choices": [{"text": "a", "finish_reason": "error"}]}, {"choices": [], "usage": USED}], None),
    ([{"choices": [{"text": '{"error": "a"}', "error": None}]}, {"choices": [], "usage": USED}], 5),
]
"""Events, and how many tokens a client counts; None: the request has failed."""


TEXTS = [{"choices": [{"index": 0, "text": text, "delta": {"content": text}}]} for text in (" a", " b")]
NULL = {"choices": [], "usage": None}
LLAMA = {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 9, "total_tokens": 11}, "timings": {}}


@pytest.mark.parametrize(
    ("endpoint", "end", "num_input"),
    [("completions", [], 128), ("chat", [], None), ("chat", [NULL], None), ("chat", [LLAMA], 9)],
)
def test_a_server_that_reports_no_usage(
    server: OpenAI, capsys: pytest.CaptureFixture[str], endpoint: str, end: list[Any], num_input: int | None
) -> None:
    server.streams = [[ROLE, *TEXTS, *end]] * 3
    assert main(bench(server, "--num-prompts", "2", "--endpoint", endpoint, "--allow-eos", "--save-detailed")) == 0
    output, status = capsys.readouterr()
    content = json.loads(output)
    total = None if num_input is None else 2 * num_input
    assert (content["total_input_tokens"], content["total_output_tokens"]) == (total, 4)
    assert (content["total_token_throughput"] is None) == (total is None)
    assert content["input_lens"] == [num_input] * 2
    assert content["without_usage"] == (0 if LLAMA in end else 2) and ("usage" in status) == (LLAMA not in end)


def test_a_stream_without_text_is_judged_by_what_it_says(server: OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    server.streams = [events for events, _ in STREAMS]
    flags = "--num-prompts", str(len(STREAMS) + 1), "--num-warmup", "0", "--max-concurrency", "1", "--save-detailed"
    assert main(bench(server, *flags)) == 1
    output, status = capsys.readouterr()
    content = json.loads(output)
    counts = [None if error else count for error, count in zip(content["errors"], content["output_lens"], strict=True)]
    assert counts == [count for _, count in STREAMS] + [5]
    assert (content["completed"], content["short_outputs"]) == (6, 4)
    assert "--allow-eos" in status and all("lost" in error for error in content["errors"][6:9])


def test_events_of_other_servers_end_no_conversation(server: OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    odd = [[ROLE, [1], {"choices": None}, {"choices": [{"delta": None}]}, *TEXTS]]
    server.streams = odd * 2
    flags = "--endpoint", "chat", "--turns", "2", "--num-prompts", "1", "--num-warmup", "0", "--allow-eos"
    assert main(bench(server, *flags)) == 0
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": " a b"}
    assert json.loads(capsys.readouterr().out)["completed"] == 2


def test_a_connection_that_takes_too_long_is_a_failed_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connection(_: object) -> None:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(_Client, "_connection", connection)
    client = _Client(Load("http://127.0.0.1:1/v1", {}, 1, [Conversation(0, [Turn(b"{}", 1)])], 5.0), 0.0)
    asyncio.run(client.run())
    assert "Connection timed out" in client.samples[0].error


def test_a_signal_ends_the_load(server: OpenAI) -> None:
    server.delay_s = 30.0
    words = [sys.executable, "-m", "fleetfoot", *bench(server, "--num-warmup", "0")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        assert server.is_asked.wait(60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143


@pytest.mark.parametrize(
    "flags",
    [
        ("--duration", "3"),
        ("--turns", "2"),
        ("--prefix-len", "200"),
        ("--trace", "x.jsonl", "--request-rate", "2"),
        ("--offline",),
        ("--plot", "load.jpg"),
        ("--header", "nothing"),
        ("--base-url", "localhost:8000"),
        ("--trace", "absent.jsonl"),
        ("--dtype", "float32"),
        ("--num-prompts", "0"),
        ("--num-warmup", "-1"),
        ("--client-processes", "0"),
        ("--turns", "0"),
        ("--num-prefixes", "0"),
        ("--vocab-size", "1"),
        ("--timeout", "0"),
    ],
)
def test_flags_that_do_not_fit_are_refused(server: OpenAI, flags: tuple[str, ...]) -> None:
    assert main(bench(server, "--num-warmup", "0", *flags)) == 2
    assert server.bodies == []


def sample(number: int, sent: float, *arrivals: float, error: str = "") -> Sample:
    first, times = arrivals[0], array("f", [one - arrivals[0] for one in arrivals[1:]]).tobytes()
    ends = arrivals[-1]
    return Sample(number, 0, sent, sent, first, ends, 10, len(arrivals), 0, len(arrivals), times, error)


def test_numbers_of_known_times() -> None:
    samples = [sample(0, 0.0, 0.5, 0.75, 1.0), sample(1, 1.0, 3.0, 3.5, 4.0), sample(2, 0.0, 1.0, error="x")]
    found = results(Outcome(samples, 4.0, (1.0,), 4.0, [0.0]), {"ttft": 1000.0, "tpot": 300.0})
    assert (found["mean_ttft_ms"], found["median_tpot_ms"], found["mean_itl_ms"]) == (1250.0, 375.0, 375.0)
    assert (found["mean_e2el_ms"], found["request_goodput"], found["output_throughput"]) == (2000.0, 0.25, 1.5)
    assert (found["max_output_tokens_per_s"], found["max_concurrent_requests"]) == (2.0, 2)
    assert found["client"]["is_limit"] is False
    assert results(Outcome(samples, 4.0, (3.9,), 4.0, [0.0]), {})["client"]["is_limit"] is True
    assert results(Outcome(samples, 4.0, (1.0,), 4.0, [0.5]), {})["client"]["is_limit"] is True


def test_a_trace_has_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entry = {"timestamp": 2000, "input_length": 600, "output_length": 9, "hash_ids": [5, 6]}
    lines = [entry, {**entry, "timestamp": 1000, "hash_ids": [5, 7]}, {"timestamp": 900, "prompt": "Hi"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    said, second, first = read_trace(str(path), SHAPE, {"model": "m"}, speed=2.0)
    assert [one.due_s for one in (said, second, first)] == pytest.approx([0.0, 0.05, 0.55])  # after the first one
    assert json.loads(said.turns[0].body)["prompt"] == "Hi"
    prompts = [json.loads(one.turns[0].body)["prompt"] for one in (first, second)]
    assert [len(prompt) for prompt in prompts] == [600, 600] and first.turns[0].max_tokens == 9
    assert prompts[0][:512] == prompts[1][:512] and prompts[0][512:] != prompts[1][512:]
    odd_lines: list[dict[str, Any]] = [{"timestamp": 1}, {**entry, "input_length": -1}, {**entry, "output_length": 0}]
    odd_lines += [{**entry, "timestamp": "a"}, {"messages": [{"role": "user", "content": "Hi"}]}]
    for odd in odd_lines:
        path.write_text(json.dumps(odd))
        with pytest.raises(UsageError):
            read_trace(str(path), SHAPE, {}, 1.0)


CHARTS = [
    Chart("a & b", "x", [Curve("<one>", [(1, 5), (10, 50)], "marked"), Curve("limit", [(1, 9), (10, 9)], "dashed")]),
    Chart("bars", "n", [Curve("", [(0.5, 1), (1.5, 3)], "bars")]),
    Chart("logs", "n", [Curve("", [(1, 0), (1, math.inf), (3, 20)], "dots")], x_is_log=True, y_is_log=True),
    Chart("empty", "n", [Curve("none", [])]),
]


def test_a_picture_is_svg_or_png(tmp_path: Path) -> None:
    draw("title", CHARTS, str(tmp_path / "a.svg"))
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert kinds.count("circle") == 3  # two of the first chart, and of the third the one that its axes can have
    assert {"title", "a & b", "<one>", "bars"} <= {element.text for element in root.iter()}
    image = pytest.importorskip("PIL.Image", reason="a PNG needs Pillow")
    draw("title", CHARTS, str(tmp_path / "a.png"))
    with image.open(tmp_path / "a.png") as drawn:
        assert drawn.size == (2 * int(root.attrib["width"]), 2 * int(root.attrib["height"]))
        assert len(drawn.getcolors(1 << 20)) > 3
