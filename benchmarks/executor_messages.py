"""What a step costs in messages between the engine and a worker process: microseconds, and bytes.

Usage: python benchmarks/executor_messages.py [--requests 256] [--steps 2000] [--workers 1]

The last column is measured between processes: from the beginning of `encode_call` to the end of `decode_reply`, with a
worker that answers at once. The others are the parts of it that compute; what is left is the way through the sockets,
and the time until a process that waits runs again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import zmq

from fleetfoot.executor.messages import (
    EngineChannel,
    StepOutput,
    WorkerAddresses,
    WorkerChannel,
    decode_call,
    decode_reply,
    encode_call,
    encode_reply,
)
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput

BLOCK_SIZE = 16
PROMPT_LEN = 1000
COLUMNS = ("step", "bytes", "encode", "decode", "answer bytes", "encode", "decode", "there and back")


def decodes(num_requests: int, num_drafts: int = 0) -> tuple[SchedulerOutput, ModelRunnerOutput]:
    """A step in which all requests decode, every sixteenth of them with a new block, and its output."""
    width = 1 + num_drafts
    step = SchedulerOutput(
        step=100_000,
        rows=list(range(num_requests)),
        num_scheduled_tokens=[width] * num_requests,
        num_decodes=num_requests,
        num_sampled=num_requests,
        total_num_scheduled_tokens=width * num_requests,
        new_block_ids=[(row, 70, [20_000 + row]) for row in range(0, num_requests, BLOCK_SIZE)],
        num_drafts=num_drafts,
        num_to_propose=num_drafts,
    )
    tokens = [[100_000 + row + place for place in range(1 + row % width)] for row in range(num_requests)]
    return step, ModelRunnerOutput(tokens, num_drafted=[num_drafts] * num_requests if num_drafts else [])


def with_a_prompt(num_requests: int) -> tuple[SchedulerOutput, ModelRunnerOutput]:
    """The same, and a request begins besides."""
    step, output = decodes(num_requests - 1)
    row = num_requests - 1
    step.rows.append(row)
    step.num_scheduled_tokens.append(PROMPT_LEN)
    step.num_sampled += 1
    step.total_num_scheduled_tokens += PROMPT_LEN
    step.new_requests.append(
        NewRequest(
            request_id="a-request-with-a-name",
            row=row,
            token_ids=array("i", range(100_000, 100_000 + PROMPT_LEN)),
            num_prompt_tokens=PROMPT_LEN,
            num_computed_tokens=0,
            block_ids=[30_000 + block for block in range(-(-PROMPT_LEN // BLOCK_SIZE))],
            params=SamplingParams(max_tokens=100),
            seed=0,
            stop_token_ids=frozenset({2}),
            bad_words_token_ids=[],
        )
    )
    output.sampled_token_ids.append([5])
    return step, output


def answer(addresses: WorkerAddresses, outputs: list[ModelRunnerOutput]) -> None:
    """A worker that has its outputs ready: one for each series of steps, which is in the step's number."""
    channel = WorkerChannel(addresses)
    with channel.open_replies() as reply:
        reply(StepOutput(0, 0, outputs[0]))  # it is there
        while message := channel.receive():
            number, *_ = decode_call(message)
            reply(StepOutput(0, number, outputs[number]))
    channel.close()


def median_us(call: Callable[[], object], count: int) -> str:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return f"{1e6 * statistics.median(times):.1f}"


class Engine:
    """The engine's end of the channel, and workers at the other."""

    def __init__(self, folder: Path, num_workers: int, outputs: list[ModelRunnerOutput]) -> None:
        self._channel = EngineChannel(folder, num_workers)
        self._poller = zmq.Poller()
        self._poller.register(self._channel.replies, zmq.POLLIN)
        context = multiprocessing.get_context("spawn")
        self._workers = [context.Process(target=answer, args=(at, outputs)) for at in self._channel.addresses]
        for worker in self._workers:
            worker.start()
        for _ in self._workers:
            self._channel.replies.recv()

    def there_and_back(self, number: int, step: SchedulerOutput) -> None:
        """A step goes to every worker, and every worker answers."""
        self._channel.send(encode_call(number, step))
        num_heard = 0
        while num_heard < len(self._workers):
            self._poller.poll()
            while message := self._channel.receive():
                decode_reply(message)
                num_heard += 1

    def close(self) -> None:
        self._channel.flush()
        self._channel.send(b"")
        for worker in self._workers:
            worker.join()
        self._channel.close()


def measure(engine: Engine, number: int, step: SchedulerOutput, output: ModelRunnerOutput, count: int) -> list[str]:
    """All columns but the first."""
    result = StepOutput(0, number, output)
    message, report = encode_call(number, step), encode_reply(result)
    return [
        str(len(message)),
        median_us(partial(encode_call, number, step), count),
        median_us(partial(decode_call, message), count),
        str(len(report)),
        median_us(partial(encode_reply, result), count),
        median_us(partial(decode_reply, report), count),
        median_us(partial(engine.there_and_back, number, step), count),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=1, help="all of which get every step and answer it")
    args = parser.parse_args()
    series = {
        f"{args.requests} decodes": decodes(args.requests),
        f"{args.requests} decodes, 3 drafts each": decodes(args.requests, num_drafts=3),
        f"{args.requests - 1} decodes, a prompt of {PROMPT_LEN}": with_a_prompt(args.requests),
    }
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder), args.workers, [output for _, output in series.values()])
        rows: list[Sequence[str]] = [COLUMNS]
        for number, (name, (step, output)) in enumerate(series.items()):
            rows.append((name, *measure(engine, number, step, output, args.steps)))
        engine.close()
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
