"""A module that an engine in another process imports for a logits processor: a step fails, and the restart of workers
waits for the test."""

import os
from typing import Any

from fleetfoot.v1.sample.logits_processor import LogitsProcessor

from fleetfoot.runner.v1.runner import ModelRunnerV1

BEGUN, END, EVERY = "TEST_RESTART_BEGUN", "TEST_RESTART_END", "TEST_EVERY_STEP_FAILS"
"""Variables with the paths of named pipes, and a flag."""

_counts = {"made": 0, "steps": 0}
_forward: Any = ModelRunnerV1._forward


def _failing(self: ModelRunnerV1, *args: Any, **kwargs: Any) -> Any:
    _counts["steps"] += 1
    if _counts["steps"] == 10 or (_counts["steps"] > 10 and EVERY in os.environ):
        raise RuntimeError("injected at a step")
    return _forward(self, *args, **kwargs)


class FailingSteps(LogitsProcessor):
    """The tenth step fails, or every one from then on. The second processor, which the restart makes, writes to a pipe
    and then reads from the other."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        ModelRunnerV1._forward = _failing  # type: ignore[method-assign]
        _counts["made"] += 1
        if _counts["made"] == 2 and BEGUN in os.environ:
            with open(os.environ[BEGUN], "w") as begun:
                begun.write("begun")
            with open(os.environ[END]) as end:
                end.read()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        return logits
