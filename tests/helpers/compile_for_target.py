"""Compiles the kernels that an engine on another GPU than a Hopper launches. Run as a module, without
``TRITON_INTERPRET``: ``compile_for_target CAPABILITY NUM_SMS SHARED_KIB MODEL MOST NAME...``, such as ``8.0 108 163 - 1
linear attention``; ``-``: a small model.

The engine's own dry passes select the kernels. Of each kernel with a ``NAME`` in its name, ``MOST`` variants are
compiled, those of the largest steps first. Prints a line of JSON for each: its name, bytes of shared memory, and the
names of all kernels that the engine launches.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fleetfoot.kernels.runtime import dependent_launch, gpu_limits

CAPABILITY = tuple(map(int, sys.argv[1].split(".")))
LIMITS = gpu_limits.GPULimits(int(sys.argv[2]), int(float(sys.argv[3]) * 1024), CAPABILITY)  # type: ignore[arg-type]
gpu_limits.gpu_limits = lambda device: LIMITS  # type: ignore[assignment]  # before others take it by its name
dependent_launch.can_overlap = lambda device: CAPABILITY >= (9, 0)  # type: ignore[assignment]

from fleetfoot.assets import embedded_model_path  # noqa: E402
from fleetfoot.config.model import RopeConfig  # noqa: E402
from fleetfoot.config.parsing import load_model_config  # noqa: E402
from fleetfoot.fusion import plan_fusion  # noqa: E402
from fleetfoot.kernels.runtime.dry_tensors import dry_torch  # noqa: E402
from fleetfoot.kernels.runtime.triton_support import instead_of_launching  # noqa: E402
from fleetfoot.layers.context import ModelContext  # noqa: E402
from fleetfoot.records.kv_layout import KVLayout  # noqa: E402
from fleetfoot.runner.graphs import CaptureTable, GraphKey, StepShape  # noqa: E402
from fleetfoot.runner.v2.runner import ModelRunnerV2  # noqa: E402
from fleetfoot.sampling.shape import MASKS, PLAIN  # noqa: E402
from fleetfoot.weights.loading import ModelLoader  # noqa: E402
from tests.helpers.kernels import triton_kernels  # noqa: E402
from tests.helpers.recording_device import RecordingDevice  # noqa: E402
from tests.helpers.specs import changed  # noqa: E402
from tests.helpers.warm_up_without_gpu import launch_nothing, use_fake_driver  # noqa: E402

TARGET = GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)
CPU = torch.device("cpu")


def make_runner(folder: Path | None) -> ModelRunnerV2:
    """Of a model in ``folder``, or of a small one with heads of 128, in two layers."""
    config = load_model_config(folder or embedded_model_path())
    if folder is None:
        heads = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "qk_norm": True}
        config = changed(config, hidden_size=1024, intermediate_size=3072, vocab_size=4096, **heads)
    config = changed(config, num_layers=2, window=None, rope=RopeConfig())
    kernels = triton_kernels(has_hopper=CAPABILITY == (9, 0))
    context = ModelContext(kernels, kernels.attention, torch.bfloat16, CPU, max_positions=2048)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    runner = ModelRunnerV2(
        ModelLoader(config, context, None, "dummy"),
        **limits,
        max_model_len=1024,
        capture_table=CaptureTable.of(device="cuda", enforce_eager=False, **limits),
        device=RecordingDevice(has_graphs=True),
        fusion=plan_fusion(config, "v2"),
    )
    runner.load_model()
    runner.initialize_kv_cache(KVLayout.of(config, 128, 16, "bfloat16"))
    return runner


class Variants:
    """The kernels that dry passes request, as sources."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, Any]] = {}

    def __call__(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        options = {name: compile[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        self.by_name.setdefault(fn.jit_function.__name__, {})[key] = source, options
        return True  # not compiled here


def main() -> None:
    use_fake_driver()
    folder, most, *names = sys.argv[4:]
    runner = make_runner(None if folder == "-" else Path(folder))
    knobs.runtime.jit_cache_hook = variants = Variants()
    instead = instead_of_launching.set(launch_nothing)
    decodes = [StepShape("decode", rows, rows) for rows in (256, 128, 64, 32, 16, 8, 1)]
    keys = [GraphKey("step", shape, PLAIN) for shape in decodes]
    keys += [GraphKey("forward", StepShape("mixed", 1, tokens)) for tokens in (2048, 20)]
    keys += [GraphKey("sampling", shape, MASKS) for shape in (decodes[0], decodes[-1])]
    with torch.inference_mode(), dry_torch():
        for key in keys:
            runner._padding.of_graph(key)()
    instead_of_launching.reset(instead)
    for name, sources in variants.by_name.items():
        for source, options in list(sources.values())[: int(most) if any(part in name for part in names) else 0]:
            compiled = triton.compile(source, target=TARGET, options=options)
            print(json.dumps([name, compiled.metadata.shared, sorted(variants.by_name)]), flush=True)


if __name__ == "__main__":
    main()
