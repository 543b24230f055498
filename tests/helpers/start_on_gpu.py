"""Starts an engine on a GPU and runs a few requests. Run as a module; prints a line of JSON, see `main`.

Usage: python -m tests.helpers.start_on_gpu ahead|lazily
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton import knobs
from triton.runtime import build

from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.runner.graphs import GraphKey
from fleetfoot.runner.v2 import runner as runner_module
from fleetfoot.runner.v2.warm_up import KernelCompiler
from tests.helpers.engines import make_engine, prompt_of

MODEL = Path(__file__).parent.parent / "assets" / "story-qwen3"


def main() -> None:
    """Prints ``compiled`` and ``found``, of the dry pass; ``late``: kernels that the warm-up had to compile for itself,
    and what launches them; ``tokens`` of requests; and ``threads`` that are left at the end."""
    report: dict[str, Any] = {"compiled": 0, "found": 0, "late": []}

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not cache_hit:
            report["late"].append(src.name)

    build_c: Callable[..., str] = build._build

    def note_c(name: str, *arguments: Any, **options: Any) -> str:
        if threading.current_thread() is threading.main_thread():
            report["late"].append(name)
        return build_c(name, *arguments, **options)

    compile_first = KernelCompiler.compile_first

    def compile_and_listen(compiler: KernelCompiler, shapes: list[GraphKey]) -> None:
        compile_first(compiler, shapes)
        report.update(compiled=compiler.ahead.num_compiled, found=compiler.ahead.num_found)
        knobs.compilation.listener = note
        build._build = note_c

    patch.object(KernelCompiler, "compile_first", compile_and_listen).start()
    if sys.argv[1] == "lazily":
        patch.object(runner_module, "can_compile_ahead", lambda device: False).start()
    engine = make_engine(
        MODEL,
        device="cuda",
        dtype="bfloat16",
        runner="v2",
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=400,
        num_gpu_blocks_override=2048,
        skip_tokenizer_init=True,
    )
    knobs.compilation.listener, build._build = None, build_c
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    for index, length in enumerate((3, 40, 350, *[20] * 40)):
        engine.add_request(str(index), {"prompt_token_ids": prompt_of(length, 2048, index)}, params)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
    engine.shutdown()
    report["tokens"] = [tokens[str(index)] for index in range(len(tokens))]
    report["threads"] = [thread.name for thread in threading.enumerate() if "compile" in thread.name]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
