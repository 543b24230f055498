"""The parts of the commands, without a model: prompts, output, conversations, loads and their numbers."""

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetfoot.cli.bench_load import BenchRequest, Lengths, Samples, Work, Workload, results, run_load
from fleetfoot.cli.bench_roofline import AttentionCosts, Costs, Roofline, batch_floors, floor_report
from fleetfoot.cli.chat import Conversation
from fleetfoot.cli.command import STORY_OPENING, UsageError, read_prompts
from fleetfoot.cli.generate import TextPrinter, dump_array, request_json
from fleetfoot.engine.stats import StatsCollector, StepStats
from fleetfoot.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.scheduler.scheduler import SchedulerStats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prompts_of_flags_come_before_those_of_a_file(tmp_path: Path) -> None:
    text, json_lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_bytes(b"first\r\n\n  second \n{}\n")
    assert read_prompts(["zero"], str(text)) == ["zero", "first", "  second ", "{}"]
    json_lines.write_text('\ufeff{"prompt": "a\\nb"}\n\n{"prompt_token_ids": [1, 2]}\n')
    assert read_prompts([], str(json_lines)) == [{"prompt": "a\nb"}, {"prompt_token_ids": [1, 2]}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt"', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1 is not JSON: maximum recursion"),
        ("a.jsonl", b'\n"x"\n', "a.jsonl, line 2 is a JSON str; it must be an object"),
        ("a.jsonl", b'{"text": "x"}', "a.jsonl, line 1 is no prompt"),
        ("a.txt", b" \n\n", "holds no prompt"),
        ("a.txt", b"\xff\n", "is not UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_prompts([], str(tmp_path / name))


def test_standard_input_is_the_prompt_unless_it_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(stdin: Any, texts: list[str], file: str | None) -> list[Any]:
        monkeypatch.setattr(sys, "stdin", stdin)
        return read_prompts(texts, file)

    assert read(io.StringIO("two\nlines\n"), [], None) == ["two\nlines"]
    assert read(io.StringIO("two\nlines\n"), [], "-") == ["two", "lines"]
    assert read(io.StringIO("not read"), ["given"], None) == ["given"]
    assert read(Terminal("not read"), [], None) == [STORY_OPENING]
    assert read(io.StringIO("\ufefffirst"), [], None) == ["first"]
    for stdin, message in ((io.StringIO(""), "is empty"), (io.StringIO(" \n"), "is empty"), (None, "is closed")):
        with pytest.raises(UsageError, match=f"standard input {message}; give a prompt .*--prompt TEXT"):
            read(stdin, [], None)


def delta(request_id: str, *texts: str | None, finished: bool = False) -> RequestOutput:
    """An output with a text for each sequence; None ends it without more."""
    completions = [
        CompletionOutput(index, text or "", [], finish_reason="stop" if text is None or finished else None)
        for index, text in enumerate(texts)
    ]
    return RequestOutput(request_id, f"<{request_id}>", [1], completions, finished)


def printed(file: io.StringIO, request_ids: list[str], num_copies: int, *outputs: RequestOutput) -> list[str]:
    """What the file holds after each output."""
    printer, texts = TextPrinter(file, request_ids, num_copies), []
    for output in outputs:
        printer.add(output)
        texts.append(file.getvalue())
    return texts


@pytest.mark.parametrize(("no_color", "text"), [("", "\x1b[1m<1>\x1b[0ma\n"), ("1", "<1>a\n")])
def test_a_prompt_is_bold_on_a_terminal(monkeypatch: pytest.MonkeyPatch, no_color: str, text: str) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    assert printed(Terminal(), ["1"], 1, delta("1", "a", finished=True)) == [text]


def test_json_has_no_number_that_json_lacks() -> None:
    logprobs = [{5: Logprob(-math.inf, 1, "é"), 6: Logprob(-1.5, 2)}]
    completion = CompletionOutput(0, "é", [5], -math.inf, logprobs, "length")
    prompt_logprobs = [None, {4: Logprob(math.nan, 7, "d")}]
    output = RequestOutput("1", None, [3, 4], [completion], True, prompt_logprobs=prompt_logprobs)
    text = dump_array([request_json(output)])
    assert text.isascii()
    (content,) = json.loads(text, parse_constant=pytest.fail)
    assert content["outputs"][0]["cumulative_logprob"] is None
    assert content["outputs"][0]["logprobs"] == [
        {
            "5": {"logprob": None, "rank": 1, "decoded_token": "é"},
            "6": {"logprob": -1.5, "rank": 2, "decoded_token": None},
        }
    ]
    assert content["prompt_logprobs"] == [None, {"4": {"logprob": None, "rank": 7, "decoded_token": "d"}}]
    assert content["metrics"]["ttft_ms"] is None


def render(messages: list[dict[str, Any]]) -> str:
    return "".join(message["content"] for message in messages)


def tokenize(text: str) -> list[int]:
    """As many tokens as there are characters; of a long text, which is not tokenized, none."""
    if len(text) > 70:
        raise ValueError("the prompt has too many characters")
    return [0] * len(text)


@pytest.fixture
def conversation() -> Conversation:
    conversation = Conversation("sys")
    for number in range(3):
        conversation.begin_turn(f"question {number}")  # 10
        conversation.end_turn(f"answer {number}")  # 8
    conversation.begin_turn("last")
    return conversation


@pytest.mark.parametrize(
    ("limit", "reserve", "num_dropped"),
    [(71, 10, 0), (70, 10, 1), (53, 10, 1), (52, 10, 2), (17, 10, 3), (16, 10, 3), (8, 10, 3), (62, 0, 0)],
)
def test_a_conversation_that_is_too_long_loses_its_oldest_turns(
    conversation: Conversation, limit: int, reserve: int, num_dropped: int
) -> None:
    messages = conversation.messages(num_dropped)
    assert messages[0] == {"role": "system", "content": "sys"}
    assert messages[-1] == {"role": "user", "content": "last"}
    assert conversation.fit(render, tokenize, limit=limit, reserve=reserve) == (tokenize(render(messages)), num_dropped)
    assert conversation.messages() == messages


def test_a_message_that_can_never_fit_changes_nothing(conversation: Conversation) -> None:
    with pytest.raises(ValueError, match="a prompt of 7 tokens, and there is room for 6"):
        conversation.fit(render, tokenize, limit=7, reserve=1)
    assert len(conversation.turns) == 4


def workload(**changes: Any) -> Workload:
    return Workload(**{"vocab_size": 100, "input_len": Lengths(8, 20), "output_len": Lengths(1, 5)} | changes)


def test_requests_arrive_at_the_rate_that_is_asked_for() -> None:
    requests = workload().random_requests(1000, stream=(1,))
    assert all(request.due_s is None for request in workload().with_arrivals(requests, math.inf))
    times = [request.due_s or 0.0 for request in workload().with_arrivals(requests, 50.0)]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 18.0 < times[-1] < 22.0


class FakeEngine:
    """Answers one request in each step, which takes a second of a clock that nothing else moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.num_steps = 0
        self.stats_collector = StatsCollector()
        self.queue: list[RequestOutput] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def stats(self) -> Any:
        """Each step preempts once, and finds one of three tokens in the prefix cache."""
        return SimpleNamespace(scheduler=SchedulerStats(0, 0, 0.0, *(factor * self.num_steps for factor in (1, 3, 1))))

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        assert params.ignore_eos
        metrics = RequestMetrics(queued_ts=self.now, num_generation_tokens=params.max_tokens or 0)
        self.queue.append(RequestOutput(request_id, None, prompt, [CompletionOutput(0, "", [1])], True, None, metrics))

    def has_unfinished_requests(self) -> bool:
        return bool(self.queue)

    def step(self) -> list[RequestOutput]:
        output = self.queue.pop(0)
        output.metrics.first_token_ts = self.now + 0.5
        self.now += 1.0
        self.num_steps += 1
        output.metrics.last_token_ts = self.now
        self.stats_collector.step(StepStats(1, 3, 0.0001, 0.75, 0.0002))
        return [output]


def load(engine: FakeEngine, requests: list[BenchRequest], samples: Samples | None = None) -> Samples:
    samples = samples or Samples()
    engine.stats_collector.itl.append(9.0)  # left over from before
    run_load(engine, requests, samples, clock=lambda: engine.now, sleep=engine.sleep)  # type: ignore[arg-type]
    return samples


def test_latencies_count_from_arrival_even_when_the_engine_was_busy() -> None:
    engine = FakeEngine()
    requests = [BenchRequest([1, 2], 4, due_s) for due_s in (0.0, 0.25, 5.0)]
    samples = load(engine, requests)
    assert engine.slept == [3.0]  # from 2 s, when the first two are done, to 5 s
    assert samples.ttft == [0.5, 1.25, 0.5]
    assert samples.request_latency == [1.0, 1.75, 1.0]
    assert samples.itl == []
    measured = results(samples, with_loads=True)
    expected = {"duration_s": 6.0, "requests_per_s": 0.5, "output_tokens_per_s": 2.0, "total_tokens_per_s": 3.0}
    expected |= {"num_steps": 3, "tokens_per_step": 3.0}
    assert measured | expected == measured
    assert measured["host_time_per_step_us"]["mean"] == pytest.approx(300.0)
    assert measured["output_time_per_step_us"] == pytest.approx(1e6 * (1.0 - 0.75 - 0.0003))
    assert measured["runner_share"] == pytest.approx(2.25 / 6.0)
    assert measured["itl_ms"]["mean"] is None
    assert measured["batch_latency_ms"]["max"] == 6000.0


def test_the_documentation_describes_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    content = results(Samples(), with_loads=True)
    for name in (*content, *content["prefix_cache"], *content["ttft_ms"]):
        assert f"`{name}`" in page


@pytest.fixture
def floor() -> Roofline:
    return Roofline(Costs(1000, 10, 40, (AttentionCosts(2, 3),)), bytes_per_s=100, flops_per_s=50)


def test_the_floor_of_a_load_is_that_of_its_steps(floor: Roofline) -> None:
    steps: list[Any] = [SimpleNamespace(num_tokens=8, num_requests=2), SimpleNamespace(num_tokens=2, num_requests=2)]
    samples = Samples(steps=steps, load_duration=[40.0, 10.0], work=[Work(4, 0, 2), Work(4, 2, 2)])
    report = floor_report(floor, samples, batch=(2, 4, 2))
    assert report is not None
    assert report["linear_s"] == 20.0
    assert report["attention_s"] == pytest.approx((4 + 4) * 3 / 50 + 2 * 5 * 2 / 100)
    assert report["share"] == pytest.approx((report["linear_s"] + report["attention_s"]) / 50.0)
    paced = floor_report(floor, samples, is_paced=True)
    assert paced is not None and paced["share"] is None and paced["duration_s"] == report["duration_s"]
    assert floor_report(None, samples) is None
    assert report["ttft_ms"] == pytest.approx(1e3 * (10.0 + 2 * 4 * 3 / 50))
    assert report["tpot_ms"] == pytest.approx(1e3 * (10.0 + 2 * 5 * 2 / 100))
    assert batch_floors(floor, 2, 4, 1).keys() == {"ttft_ms"}
