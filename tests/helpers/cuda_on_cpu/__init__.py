"""Kernels in CUDA C++, compiled for a CPU by g++ and run on tensors in host memory; see ``fibers.h`` beside."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path
from typing import Any

from fleetfoot.kernels.runtime.cuda_source import CudaKernel
from fleetfoot.kernels_hopper.cluster.layer_blocks import (
    FOLDER,
    Arguments,
    LayerShape,
    LayerTiling,
    defines,
    shared_bytes,
)

HERE = Path(__file__).parent
PACKAGE = FOLDER.parent.parent


def _compile(source: str, folders: list[Path], macros: list[str], library: Path) -> ctypes.CDLL:
    command = ["g++", "-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-w", "-Wno-psabi"]
    command += [f"-I{folder}" for folder in (HERE, *folders)]
    subprocess.run([*command, *macros, str(HERE / source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class LayerBlocksOnCpu:
    """Both kernels for one shape. ``folder``: for the compiled library."""

    def __init__(self, shape: LayerShape, tiling: LayerTiling, folder: Path) -> None:
        macros = [f"-D{name}={value}" for name, value in defines(shape, tiling)]
        loaded = _compile("layer_blocks.cpp", [FOLDER], macros, folder / "layer_blocks.so")
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


class ProductOnCpu:
    """A kernel of linear layers, with the methods of `LoadedKernel`. ``folder``: for the compiled library."""

    is_dry = False

    def __init__(self, kernel: CudaKernel, folder: Path) -> None:
        self._kernel = kernel
        source = PACKAGE / kernel.source
        macros = [f"-D{name}={value}" for name, value in kernel.defines]
        macros += [f'-DSOURCE="{source}"', f"-DFUNCTION={kernel.function}"]
        # its header of the GPU's functions is the one beside; others are those of the kernel
        self._run = _compile("product.cpp", [source.parent], macros, folder / f"{abs(hash(kernel))}.so").run

    def launch(self, num_ctas: int, arguments: bytes, *, dependent: bool) -> None:
        """See `LoadedKernel`.

        Raises:
            RuntimeError: threads wait forever.
        """
        aligned = ctypes.create_string_buffer(len(arguments) + 64)
        begin = -ctypes.addressof(aligned) % 64
        ctypes.memmove(ctypes.addressof(aligned) + begin, arguments, len(arguments))
        kernel = self._kernel
        sizes = num_ctas, kernel.cluster, kernel.threads, kernel.shared_bytes
        if self._run(ctypes.byref(aligned, begin), *sizes):
            raise RuntimeError("deadlock")


def encode_tensor_map(name: str, address: ctypes.c_void_p, *arguments: Any) -> None:
    """`driver_call` for ``cuTensorMapEncodeTiled``: the ``TensorMap`` of ``hopper.cuh`` beside."""
    assert name == "cuTensorMapEncodeTiled" and address.value is not None
    _, rank, pointer, sizes, strides, box = arguments[:6]
    ones = (1,) * (5 - rank)
    packed = struct.pack("<QQ5Q4Q5I", pointer.value, rank, *sizes, *ones, *strides, *(0,) * (5 - rank), *box, *ones)
    ctypes.memmove(address.value, packed, len(packed))
