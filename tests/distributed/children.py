"""Programs that a test starts, and kills: engines of two processes. Run as a module, with the name of one."""

from __future__ import annotations

import signal
import sys

from tests.distributed.small_engines import LONG, PROMPT, SMALL, executor_of

from fleetfoot import LLM


def start() -> LLM:
    """An engine; says its workers' process ids."""
    llm = LLM(tensor_parallel_size=2, **SMALL)
    print(*executor_of(llm.llm_engine).worker_pids.values(), flush=True)
    return llm


def generate_for_ever() -> None:
    """Until a signal ends it; nobody shuts the engine down."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent of the tests has made of it
    llm = start()
    while True:
        llm.generate([PROMPT] * 4, LONG, use_tqdm=False)


def end_without_shutdown() -> None:
    """Generates once, and reaches its end."""
    start().generate([PROMPT], LONG, use_tqdm=False)


if __name__ == "__main__":
    {"generate_for_ever": generate_for_ever, "end_without_shutdown": end_without_shutdown}[sys.argv[1]]()
