"""The model runner that a block of code forces on the engines that it creates; see `fleetfoot.testing.force_runner`.

The value belongs to the context of the code that creates an engine (`contextvars`): tasks that begin in a block have
it, threads do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from fleetfoot.config import env
from fleetfoot.plan.plan import EnginePlan


@dataclass(slots=True, eq=False)
class ForcedRunner:
    """A block that forces a runner."""

    runner: str
    outer: ForcedRunner | None = None
    """The block around it."""
    plans: list[EnginePlan] = field(default_factory=list)
    """The plans of the engines that have started in the block."""
    num_others: int = 0
    """Engines that ran on another runner."""
    is_active: bool = True
    """Blocks that overlap may end in any order, and in another context."""

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables in place of the environment, which may name another runner."""
        return {env.USE_V2_MODEL_RUNNER: {"v1": "0", "v2": "1"}[self.runner]}

    def check_plan(self, plan: EnginePlan) -> None:
        """Raises ValueError: the engine's own settings select another runner."""
        if plan.runner != self.runner:
            raise ValueError(
                f"force_runner({self.runner!r}) is in effect, and the engine would run on {plan.runner!r}: "
                f"{' '.join(plan.reasons)} Leave that setting out, or use force_runner({plan.runner!r})"
            )

    def check_runner(self, runner_name: str, plan: EnginePlan) -> None:
        """Count an engine by the runner that its workers report. Raises AssertionError: it is another one."""
        if runner_name != self.runner:
            self.num_others += 1
            raise AssertionError(f"force_runner({self.runner!r}) is in effect, and the engine runs on {runner_name!r}")
        self.plans.append(plan)


_INNERMOST: ContextVar[ForcedRunner | None] = ContextVar("forced_runner", default=None)


def forced_runners() -> Iterator[ForcedRunner]:
    """The blocks around the caller, from the innermost one."""
    block = _INNERMOST.get()
    while block is not None:
        if block.is_active:
            yield block
        block = block.outer


def begin_forcing(runner: str) -> ForcedRunner:
    """Begin a block, which ends when its ``is_active`` is False."""
    block = ForcedRunner(runner, next(forced_runners(), None))
    _INNERMOST.set(block)
    return block
