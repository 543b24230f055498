"""Every way out of a process with an engine: the end of the program, with threads and requests; forks; Ctrl-C."""

import json
import sys
from pathlib import Path

import pytest
from tests.helpers.faulty_connector import connector
from tests.helpers.processes import HANG, running_child

IMPORTING = ("env", sys.executable)
"""An interpreter that has to import all it needs, while the program may end; others are forked."""
PROGRAM = """
import asyncio, gc, os, sys, threading
from fleetfoot import LLM, AsyncLLM, SamplingParams

SHORT, LONG = (SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 200))
started, keep = threading.Event(), []

async def stream(llm, params=LONG):
    async for _ in llm.generate("Once upon", params, "1"):
        started.set()

async def several(way):
    llm = AsyncLLM(device="cpu")
    keep.append(asyncio.create_task(stream(llm)))
    await asyncio.to_thread(started.wait)
    if way == "exception":
        raise ValueError("of the program")
    if way == "exit":
        sys.exit(3)

class Bar:
    def update(self, count):
        started.set()

    def close(self):
        pass

def in_daemon(target):
    threading.Thread(target=target, daemon=True).start()
    started.wait()

def fork(tensor_parallel_size, call, *, after):
    pid = os.fork()
    if not pid:
        for refused in (call, lambda: LLM(device="cpu")):
            try:
                refused()
            except RuntimeError as error:
                assert "'spawn'" in str(error)
                print("refused", flush=True)
        after()
        gc.collect()
        sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    call()
"""


def run_program(code: str, python: tuple[str, ...] = (sys.executable,)) -> tuple[int, str, str]:
    """Exit code and output of `PROGRAM` with some code behind it."""
    with running_child(*python, "-c", PROGRAM + code) as child:
        output, errors = child.communicate(timeout=HANG)
        return child.returncode, output, errors


@pytest.mark.parametrize(
    ("way", "exit_code", "code"),
    [
        ("end", 0, "asyncio.run(several('end'))"),
        ("exception", 1, "asyncio.run(several('exception'))"),
        ("sys.exit", 3, "asyncio.run(several('exit'))"),
        ("loop in a daemon thread", 0, "in_daemon(lambda: asyncio.run(stream(AsyncLLM(device='cpu'))))"),
        (
            "generate in a daemon thread",
            0,
            "llm = LLM(device='cpu')\n"
            "in_daemon(lambda: llm.generate(['a', 'b'], [LONG, SHORT], use_tqdm=lambda **_: Bar()))",
        ),
        ("start in a daemon thread", 0, "in_daemon(lambda: (started.set(), LLM(device='cpu')))"),
        (
            "a thread after the end of another engine",
            6,
            "import atexit, contextlib\nstack = contextlib.ExitStack()\natexit.register(stack.close)\n"
            "stack.push(lambda kind, *_: kind is RuntimeError and os._exit(6))\n"
            "stack.callback(AsyncLLM, device='cpu')\nllm = LLM(device='cpu')",
        ),
        (
            "a handler of a signal shuts down",
            4,
            "import signal\nllm = LLM(device='cpu')\n"
            "signal.signal(signal.SIGTERM, lambda *_: (llm.shutdown(), sys.exit(4)))\nstep = llm.llm_engine.core.step\n"
            "llm.llm_engine.core.step = lambda *rest: (signal.raise_signal(signal.SIGTERM), step(*rest))\n"
            "llm.generate('a', LONG, use_tqdm=False)",
        ),
    ],
)
def test_a_program_ends_while_requests_run(way: str, exit_code: int, code: str) -> None:
    returned, _, errors = run_program(code, IMPORTING if way.startswith("start") else (sys.executable,))
    assert returned == exit_code, errors
    assert errors == "" or (way == "exception" and errors.endswith("ValueError: of the program\n")), errors


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        (
            "llm = LLM(device='cpu', tensor_parallel_size={size})\n"
            "call = lambda: llm.generate('Once upon', SHORT, use_tqdm=False)\n",
            2,
        ),
        (
            "llm = AsyncLLM(device='cpu', tensor_parallel_size={size})\n"
            "call = lambda: asyncio.run(stream(llm, SHORT))\n",
            1,
        ),
    ],
    ids=["LLM", "AsyncLLM"],
)
def test_a_forked_process_refuses_and_leaves_the_engine_alone(engine: str, size: int) -> None:
    fork = f"call()\nfork({size}, call, after=lambda: llm.shutdown())\nfork({size}, call, after=lambda: None)\n"
    exit_code, output, errors = run_program(engine.format(size=size) + fork)
    assert (exit_code, errors) == (0, "")
    assert output.split() == ["refused", "refused", "5"] * 2


INTERRUPTED = """
import os, signal, sys
from unittest import mock
from fleetfoot.__main__ import run

def interrupting(owner, name, number):
    method, calls = getattr(owner, name), iter(range(1, 999))
    def called(*arguments, **keywords):
        result = method(*arguments, **keywords)
        if next(calls) == number:
            os.killpg(0, kind)  # as a terminal does, or what ends a service
            if kind == signal.SIGINT:
                signal.raise_signal(kind)
        return result
    setattr(owner, name, called)

signal.signal(signal.SIGINT, signal.default_int_handler)
name, place, *sys.argv[1:] = sys.argv[1:]
kind = signal.Signals[name]
if place == "start":
    from multiprocessing.context import SpawnProcess
    interrupting(SpawnProcess, "start", 2)
else:
    from fleetfoot.scheduler.scheduler import Scheduler
    interrupting(Scheduler, "schedule", 3)
sys.exit(run())
"""
SMALL = ("--device", "cpu", "--max-num-seqs", "2")
TWO = (*SMALL, "--tensor-parallel-size", "2")


@pytest.mark.parametrize(
    ("kind", "place", "words"),
    [
        ("SIGINT", "step", ("generate", "--prompt", "Once", *SMALL)),
        ("SIGINT", "step", ("generate", "--prompt", "Once", "--stream", *TWO)),
        ("SIGINT", "start", ("generate", "--prompt", "Once", *TWO)),
        ("SIGINT", "step", ("bench", "latency", "--output-len", "8", *SMALL)),
        ("SIGINT", "step", ("bench", "throughput", "--num-prompts", "4", *TWO)),
        ("SIGINT", "step", ("verify", *SMALL)),
        ("SIGINT", "step", ("chat", "--chat-template", "TEMPLATE", *SMALL)),
        ("SIGTERM", "step", ("bench", "throughput", "--num-prompts", "4", *TWO)),
        ("SIGTERM", "step", ("chat", "--chat-template", "TEMPLATE", *SMALL)),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words, tuple) else words,
)
def test_a_signal_ends_a_command_silently(kind: str, place: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "input").write_text("Hello\n")
    command = [str(tmp_path / "template") if word == "TEMPLATE" else word for word in words]
    python = IMPORTING if place == "start" else (sys.executable,)
    child_command = (*python, "-c", INTERRUPTED, kind, place, *command)
    with (tmp_path / "input").open() as stdin, running_child(*child_command, stdin=stdin) as child:
        _, errors = child.communicate(timeout=HANG)  # it ends when workers, which have the same pipes, have ended too
        assert (child.returncode, errors.strip()) == ({"SIGINT": 130, "SIGTERM": 143}[kind], "")


def test_sigterm_flushes_what_a_connector_saves(tmp_path: Path) -> None:
    """The blocks of a request that is aborted are saved by the last step."""
    config = json.dumps(connector("SharedStorageConnector", shared_storage_path=str(tmp_path)))
    words = (
        "generate",
        "--prompt",
        "Once",
        "--ignore-eos",
        "--block-size",
        "2",
        "--kv-transfer-config",
        config,
        *SMALL,
    )
    with running_child(sys.executable, "-c", INTERRUPTED, "SIGTERM", "step", *words) as child:
        _, errors = child.communicate(timeout=HANG)
    assert (child.returncode, errors) == (143, "")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2  # of 4 tokens with KV: 2, and 2 generated
