"""What the installed torch was built for, found without importing it, which takes seconds."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Fields of ``torch.version``."""

    version: str
    """As ``2.13.0+cpu``."""
    cuda: str | None
    """The version of CUDA, as ``13.0``; None: torch does not compute on GPUs of NVIDIA."""
    hip: str | None
    """The version of ROCm; None: torch does not compute on GPUs of AMD."""


@cache
def torch_build() -> TorchBuild:
    """The torch that an import would find. Raises ModuleNotFoundError: there is none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return TorchBuild(str(found["__version__"]), found.get("cuda"), found.get("hip"))


def find_nvrtc(cuda_version: str | None) -> Path | None:
    """NVRTC of the wheels that torch depends on; None: it is not installed. ``cuda_version``: of torch."""
    spec = find_spec("nvidia")
    if cuda_version is None or spec is None:
        return None
    major = cuda_version.partition(".")[0]
    part = "cuda_nvrtc" if major == "12" else f"cu{major}"
    paths = (Path(folder, part, "lib", f"libnvrtc.so.{major}") for folder in spec.submodule_search_locations or ())
    return next(filter(Path.is_file, paths), None)
