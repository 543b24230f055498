"""The cluster kernels, compiled for a CPU by g++ and run on tensors in host memory; see ``device.cuh`` beside."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from fleetfoot.kernels.cluster.layer_blocks import (
    FOLDER,
    Arguments,
    LayerShape,
    LayerTiling,
    defines,
    shared_bytes,
)

HERE = Path(__file__).parent


class LayerBlocksOnCpu:
    """Both kernels for one shape. ``folder``: for the compiled library."""

    def __init__(self, shape: LayerShape, tiling: LayerTiling, folder: Path) -> None:
        library = folder / "layer_blocks.so"
        macros = [f"-D{name}={value}" for name, value in defines(shape, tiling)]
        command = ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-w", f"-I{HERE}"]
        command += [f"-I{FOLDER}", *macros, str(HERE / "layer_blocks.cpp"), "-o", str(library)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
        self.kernels = loaded.run_attention_block, loaded.run_mlp_block
        self._blocks = tiling.clusters * tiling.ctas, tiling.mlp_clusters * tiling.ctas
        self._shared_bytes = shared_bytes(tiling)

    def __call__(self, arguments: tuple[Arguments, Arguments]) -> None:
        """Both kernels of a layer.

        Raises:
            RuntimeError: threads wait forever.
        """
        for kernel, each, blocks, size in zip(self.kernels, arguments, self._blocks, self._shared_bytes, strict=True):
            if kernel(ctypes.byref(each), blocks, size):
                raise RuntimeError("deadlock")
