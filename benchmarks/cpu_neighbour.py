"""Decoding beside a process that keeps one core busy: threads that wait for one without a core are the risk.

    python benchmarks/cpu_neighbour.py [--model MODEL] [--cores 2] [--tokens 256] [--rounds 7] [--json FILE]

Engines with 1 and with all threads run in turns on the same cores, alone and beside the busy process, one request each.
Printed are the medians of the rounds in tokens/s, and the ratio of many threads to one in both cases; the rounds are
compared within themselves, so a drift of the machine's speed cancels.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from fleetfoot.assets import embedded_model_path

_CHILD = "--child"


def decode(model: str, num_tokens: int) -> None:
    """For each line of standard input, print the tokens/s of a request."""
    import time

    from fleetfoot import LLM, SamplingParams

    load_format = "auto" if list(Path(model).glob("*.safetensors")) else "dummy"
    llm = LLM(model, load_format=load_format, skip_tokenizer_init=True, device="cpu", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": [5, 6, 7]}
    for _ in sys.stdin:
        begin = time.perf_counter()
        llm.generate(prompt, params, use_tqdm=False)
        print(num_tokens / (time.perf_counter() - begin), flush=True)


class Engine:
    """An engine in a process of its own, with so many threads."""

    def __init__(self, model: str, num_tokens: int, num_threads: int) -> None:
        words = [sys.executable, __file__, _CHILD, model, str(num_tokens)]
        env = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3):
            self.rate()

    def rate(self) -> float:
        """Tokens/s of a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(embedded_model_path()), help="random weights, if the folder has none")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.kill(busy.pid, signal.SIGSTOP)
    engines = {count: Engine(arguments.model, arguments.tokens, count) for count in (1, arguments.cores)}
    rates: dict[tuple[int, str], list[float]] = {(count, case): [] for count in engines for case in ("alone", "beside")}
    for _ in range(arguments.rounds):
        for case, number in (("alone", signal.SIGSTOP), ("beside", signal.SIGCONT)):
            os.kill(busy.pid, number)
            for count, engine in engines.items():
                rates[count, case].append(engine.rate())
    busy.kill()
    for engine in engines.values():
        engine.close()
    print("| threads | alone | beside a busy process |\n| --- | --- | --- |")
    for count in engines:
        alone, beside = (statistics.median(rates[count, case]) for case in ("alone", "beside"))
        print(f"| {count} | {alone:.0f} | {beside:.0f} |")
    many = arguments.cores
    for case in ("alone", "beside"):
        ratios = [more / one for one, more in zip(rates[1, case], rates[many, case], strict=True)]
        print(f"{case}: {many} threads to one {statistics.median(ratios):.2f}, least {min(ratios):.2f}")
    if arguments.json is not None:
        named = {f"{count} threads, {case}": found for (count, case), found in rates.items()}
        arguments.json.write_text(json.dumps({"cores": arguments.cores, "load": os.getloadavg()[0], **named}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        decode(sys.argv[2], int(sys.argv[3]))
    else:
        main()
