"""Starts one engine, serves requests of every sort, and reports what was compiled when. Run as a module, in a process
of its own; prints a line of JSON, see `main`.

Usage: python -m tests.helpers.cold_start ahead|lazily SETTINGS, the JSON of `EngineConfig`'s.
"""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton import knobs
from triton.runtime import build

from fleetfoot.engine.engine import LLMEngine
from fleetfoot.kernels.runtime.compile_ahead import Compilations, CompileAhead
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.runner.v2 import runner as runner_module
from fleetfoot.runner.v2.warm_up import KernelCompiler
from tests.helpers import shared_kernels
from tests.helpers.engines import make_engine, prompt_of, run_requests

VOCAB = 2048
LARGE = ("sympy", "torch._dynamo", "torch._inductor")
GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 0.9, "seed": 3}
SAMPLING: dict[str, dict[str, Any]] = {
    "random": RANDOM,
    "filters": {**RANDOM, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {**GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "biases": {**RANDOM, "logit_bias": {300: 2.0, 400: -3.0}, "allowed_token_ids": list(range(250, 900))},
    "minimum": {**GREEDY, "min_tokens": 6, "stop_token_ids": list(range(300, 600)), "ignore_eos": False},
    "logprobs": {**GREEDY, "logprobs": 3},
    "many logprobs": {**GREEDY, "logprobs": 300},
    "prompt logprobs": {**GREEDY, "prompt_logprobs": 2},
    "everything": {**RANDOM, "top_p": 0.8, "top_k": 50, "repetition_penalty": 1.1, "logprobs": 5},
}


def requests(wave: int) -> dict[str, tuple[Any, SamplingParams]]:
    """By name: prompts of many lengths, and all that sampling has; in the second wave, more of them at once."""

    def request(length: int, place: int, **features: Any) -> tuple[Any, SamplingParams]:
        prompt = prompt_of(length, VOCAB, seed=1000 * wave + place)
        prompt[length // 2 :] = prompt[: length - length // 2]  # so that n-grams are found
        params = SamplingParams(**{"max_tokens": 10, "ignore_eos": True, "detokenize": False, **features})
        return {"prompt_token_ids": prompt}, params

    lengths = (1, 7, 40, 130, 350) if wave == 0 else (3, 350, *[20] * 24)
    named = {f"{wave} greedy {place}": request(length, place, **GREEDY) for place, length in enumerate(lengths)}
    return named | {
        f"{wave} {name}": request(12 + place, 100 + place, **features)
        for place, (name, features) in enumerate(SAMPLING.items())
    }


@contextmanager
def watch(report: dict[str, Any]) -> Iterator[list[Compilations]]:
    """Adds what is compiled, when and how, to ``report``. Yields the compilations of each dry pass."""
    queue, compile_first, build_c = CompileAhead.queue, KernelCompiler.compile_first, build._build
    queued: list[Compilations] = []
    warnings: list[str] = []
    report.update(compiled=0, found=0, late=[], imports=[], warnings=warnings)

    def note_queued(*arguments: Any, **options: Any) -> Compilations:
        queued.append(queue(*arguments, **options))
        return queued[-1]

    def note_late(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not cache_hit:
            report["late"].append(src.name)

    def note_late_c(name: str, *arguments: Any, **options: Any) -> str:
        if threading.current_thread() is threading.main_thread():
            report["late"].append(name)
        return build_c(name, *arguments, **options)

    def compile_and_listen(compiler: KernelCompiler, *shapes: Any) -> None:
        modules = {*sys.modules}
        compile_first(compiler, *shapes)
        report["imports"] = [name for name in LARGE if name in {*sys.modules} - modules]
        report.update(compiled=compiler.ahead.num_compiled, found=compiler.ahead.num_found)
        compiler.ahead._tally._before = note_late
        shared_kernels.SharedKernels.main_thread_compiles = True
        stack.enter_context(patch.object(build, "_build", note_late_c))

    def note_warning(record: logging.LogRecord) -> bool:
        if "compiled ahead" in record.getMessage():
            warnings.append(record.getMessage())
        return True

    with ExitStack() as stack:
        stack.enter_context(patch.object(CompileAhead, "queue", note_queued))
        stack.enter_context(patch.object(KernelCompiler, "compile_first", compile_and_listen))
        stack.callback(setattr, knobs.compilation, "listener", knobs.compilation.listener)
        handler = logging.NullHandler(logging.WARNING)
        handler.handle = note_warning  # type: ignore[method-assign]
        logging.getLogger("fleetfoot").addHandler(handler)
        yield queued


def serve(engine: LLMEngine, wave: int) -> dict[str, list[int]]:
    return {name: list(output.outputs[0].token_ids) for name, output in run_requests(engine, requests(wave)).items()}


def main() -> None:
    """Prints ``runner``; ``compiled`` and ``found``, before the warm-up; ``late``: kernels that the main thread
    compiled in the warm-up, and what launches them; ``failed``: kernels of each dry pass; ``warnings`` about them;
    ``prepared``: graphs captured between the two waves; ``tokens``; ``threads`` of ours that are left; and
    ``imports``, large ones, of the first dry pass.

    The first requests are served while kernels are compiled for later ones, the others behind that.
    """
    how, settings = sys.argv[1], json.loads(sys.argv[2])
    report: dict[str, Any] = {}
    with watch(report) as queued:
        if how == "lazily":
            patch.object(runner_module, "can_compile_ahead", lambda device: False).start()
        engine = make_engine(Path(settings.pop("model")), max_logprobs=300, **settings)
        late = [*report["late"]]
        report["runner"] = engine.runner_name
        report["tokens"] = serve(engine, 0)
        report["failed"] = [compilations.wait() for compilations in queued]  # until nothing is being compiled
        report["prepared"] = sum(1 for _ in iter(engine.prepare, False))
        report["tokens"] |= serve(engine, 1)
        engine.shutdown()
    report["late"] = late
    report["threads"] = [thread.name for thread in threading.enumerate() if "compile" in thread.name]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
