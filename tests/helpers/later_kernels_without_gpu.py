"""Prints, as JSON, kernels that graphs of any sampling and eager steps of any size launch and that `later_shapes` do
not: pairs of a shape and a kernel's name. Run as a module, without ``TRITON_INTERPRET``; compiles nothing."""

import itertools
import json
import sys
from typing import Any

import torch
from triton import knobs

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.model import RopeConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.kernels.runtime.dry_tensors import dry_torch
from fleetfoot.kernels.runtime.triton_support import instead_of_launching
from fleetfoot.runner.graphs import CaptureTable, GraphKey
from fleetfoot.runner.v2.warm_up import later_shapes
from fleetfoot.sampling.shape import EVERYTHING, PLAIN, TOP_K, SamplingVariant
from tests.helpers.specs import changed
from tests.helpers.warm_up_without_gpu import launch_nothing, make_runner, use_fake_driver

LIMITS: Any = {"max_num_seqs": 128, "max_num_batched_tokens": 1024}
SIZES = (1, 2, 16, 32, 128)
"""Decodes that are compared; others have their kernels."""
EAGER_SIZES = (3, 17, 33, 97, 127)
"""Prompts of one step that is not padded to a graph."""


def main() -> None:
    use_fake_driver()
    config = load_model_config(embedded_model_path())
    config = changed(config, num_layers=1, window=None, rope=RopeConfig(), vocab_size=32000)
    short = ((1, 90), (2, 60), (4, 30))
    table = CaptureTable.of(device="cuda", enforce_eager=False, short_contexts=short, **LIMITS)
    runner = make_runner(config, table, **LIMITS)
    launched: dict[str, str] = {}

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        launched[key] = fn.jit_function.__name__
        return True  # not compiled

    knobs.runtime.jit_cache_hook = note
    instead_of_launching.set(launch_nothing)

    def kernels(shape: GraphKey) -> dict[str, str]:
        launched.clear()
        with torch.inference_mode(), dry_torch():
            runner._step_graphs.step(shape)()
        return {**launched}

    compiled = {key for shape in later_shapes(table.keys, table.fine, 0) for key in kernels(shape)}
    flags = (False, True)
    variants = [SamplingVariant(*variant) for variant in itertools.product(flags, flags, flags, (None, 32), flags)]
    shapes = [GraphKey("decode", size, size, variant) for variant in variants for size in SIZES]
    shapes += [GraphKey("mixed", size, 500, kind) for kind in (PLAIN, TOP_K, EVERYTHING) for size in EAGER_SIZES]
    shapes += [GraphKey("mixed", 128, size) for size in table.fine]
    missing = [(str(shape), name) for shape in shapes for key, name in kernels(shape).items() if key not in compiled]
    json.dump({"compiled": len(compiled), "missing": missing}, sys.stdout)


if __name__ == "__main__":
    main()
