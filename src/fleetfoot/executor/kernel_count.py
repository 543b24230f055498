"""How many kernels a start compiles."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from fleetfoot.executor.worker import Worker
from fleetfoot.kernels.runtime.compile_ahead import DryPasses
from fleetfoot.kernels.runtime.gpu_limits import HOPPER_LIMITS, absent_gpu

if TYPE_CHECKING:
    from fleetfoot.plan.plan import EnginePlan
    from fleetfoot.runner.v2.runner import ModelRunnerV2


def count_kernels(plan: EnginePlan) -> int | None:
    """The kernels that a start of a plan compiles, or finds in the cache: a worker without memory requests them as that
    of the start does. For a plan that `kernel_table` takes. None: it compiles none ahead, or Triton interprets here."""
    from triton import knobs

    if not plan.compiles_kernels or knobs.runtime.interpret:
        return None
    with absent_gpu(replace(HOPPER_LIMITS, num_sms=plan.machine.num_sms)) as device:
        passes = DryPasses()
        config = replace(plan.config, enable_sleep_mode=False)
        worker = Worker(replace(plan, config=config, connector=None), device=device)
        worker.prepare()
        cast("ModelRunnerV2", worker.runner).queue_kernels(passes)
        return len(passes.kernels)
