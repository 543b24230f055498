"""Builds the optional native library: CPU kernels in plain C, once for each instruction set of the architecture.

Everything else about the package stands in pyproject.toml. Without a C compiler the package installs all the same and
runs on torch alone.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("src/fleetfoot/native")
COMMON = [str(NATIVE / name) for name in ("device_memory.c", "dispatch.c", "mappings.c", "threads.c", "watching.c")]
"""Compiled once: the same for all instruction sets."""
BLOCKS = str(NATIVE / "blocks.c")
"""Compiled for instruction sets of its own: products of bytes."""
KERNELS = sorted(str(path) for path in NATIVE.glob("*.c") if str(path) not in (*COMMON, BLOCKS))
HEADERS = sorted(str(path) for path in NATIVE.glob("*.h"))
CHECKSUM = 0
"""Of all sources; `fleetfoot.native.loading` compares it with those that it finds."""
for file in sorted([*NATIVE.glob("*.c"), *NATIVE.glob("*.h")]):
    CHECKSUM = zlib.crc32(file.read_bytes(), CHECKSUM)
# -ffp-contract=off: the source says which sums are fused, so that every place computes the same bits.
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-ffp-contract=off",
]
# Variant name -> compiler flags. The library asks the processor at run time which one to use.
X86_VARIANTS = {"sse4": ["-msse4.2", "-mpopcnt"], "avx2": ["-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c"]}
X86_VARIANTS["avx512"] = [
    *X86_VARIANTS["avx2"],
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd"),
]
X86_VARIANTS["avx512_bf16"] = [*X86_VARIANTS["avx512"], "-mavx512bf16"]
BLOCK_VARIANTS = {name: X86_VARIANTS[name] for name in ("sse4", "avx2")}
BLOCK_VARIANTS["avx512_vnni"] = [*X86_VARIANTS["avx512"], "-mavx512vnni"]
ARM_BLOCK_VARIANTS = {"generic": [], "dotprod": ["-march=armv8.2-a+dotprod"]}
X86_VARIANTS["amx"] = [*X86_VARIANTS["avx512_bf16"], "-mamx-tile", "-mamx-bf16"]


class BuildNative(build_ext):
    """Compiles every kernel file once per variant that the compiler knows, and links all of them into one library."""

    def get_ext_filename(self, fullname: str) -> str:
        # Loaded through ctypes, not imported: no Python ABI in the name, one library for every Python.
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        machine = sysconfig.get_platform().rpartition("-")[2]  # or a cross compiler's, by _PYTHON_HOST_PLATFORM
        x86 = machine in ("x86_64", "amd64")
        variants = {name: flags for name, flags in X86_VARIANTS.items() if self._accepts(flags)} if x86 else {}
        jobs: list[tuple[str, str, list[str]]] = [(source, "common", []) for source in COMMON]
        for name, flags in (variants or {"generic": []}).items():
            jobs += [(kernel, name, flags) for kernel in KERNELS]
        of_blocks = BLOCK_VARIANTS if x86 else ARM_BLOCK_VARIANTS if machine in ("aarch64", "arm64") else {}
        blocks = {name: flags for name, flags in of_blocks.items() if self._accepts(flags)}
        jobs += [(BLOCKS, name, flags) for name, flags in (blocks or {"generic": []}).items()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each job waits for a compiler of its own
            objects = [path for paths in pool.map(lambda job: self._compile(*job), jobs) for path in paths]
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(target), extra_postargs=["-pthread"])

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def _compile(self, source: str, variant: str, flags: list[str]) -> list[str]:
        return self.compiler.compile(
            [source],
            output_dir=str(Path(self.build_temp) / variant),
            macros=[("FF_VARIANT", variant), ("FF_SOURCES", f"{CHECKSUM}u")],
            extra_postargs=[*FLAGS, *flags],
            depends=HEADERS,
        )

    def _accepts(self, flags: list[str]) -> bool:
        """Whether the compiler takes these flags, found by compiling an empty function with them."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.c"
            source.write_text("int probe(void) { return 0; }\n")
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=flags)
            except CompileError:
                return False
        return True


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python: its library is called through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("fleetfoot.native.libfleetfoot", sources=[*KERNELS, BLOCKS, *COMMON], optional=True)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
