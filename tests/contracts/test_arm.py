"""Products of blocks with NEON's dot products: compiled by a cross compiler, run by an emulator of the processor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.contracts

NATIVE = Path(__file__).parents[2] / "src" / "fleetfoot" / "native"
ARM = "aarch64-linux-gnu-gcc"
PROGRAM, FUZZER = (Path(__file__).parents[1] / "helpers" / name for name in ("block_products.c", "fuzz_blocks.c"))
FLAGS = ["-std=gnu11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-static", "-w"]


def outputs(
    folder: Path,
    compiler: str,
    emulator: list[str],
    *flags: str,
    program: Path = PROGRAM,
    arguments: tuple[str, ...] = (),
) -> bytes:
    """What the program prints if it is compiled so: outputs of all types of blocks."""
    path = folder / "program"
    sources = [str(program), *(str(NATIVE / name) for name in ("blocks.c", "threads.c", "mappings.c"))]
    subprocess.run([compiler, *FLAGS, *flags, f"-I{NATIVE}", *sources, "-o", str(path), "-lm"], check=True)
    return subprocess.run([*emulator, str(path), *arguments], check=True, capture_output=True).stdout


@pytest.mark.skipif(not (shutil.which(ARM) and shutil.which("qemu-aarch64")), reason=f"needs {ARM} and qemu-aarch64")
def test_dot_products_have_the_bits_of_plain_c(tmp_path: Path) -> None:
    emulator = ["qemu-aarch64", "-cpu", "max"]
    found = outputs(tmp_path, ARM, emulator, "-march=armv8.2-a+dotprod")
    assert len(found) == 10 * 4 * (21 * 19 + 3 * 19)
    assert found == outputs(tmp_path, ARM, emulator) == outputs(tmp_path, "cc", [], "-msse4.2")


@pytest.mark.skipif(not (shutil.which(ARM) and shutil.which("qemu-aarch64")), reason=f"needs {ARM} and qemu-aarch64")
def test_random_blocks_and_shapes_read_no_memory_of_others(tmp_path: Path) -> None:
    emulator = ["qemu-aarch64", "-cpu", "max"]
    flags = "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"
    found = [
        outputs(tmp_path, ARM, emulator, *flags, *variant, program=FUZZER, arguments=("7", "300"))
        for variant in (("-march=armv8.2-a+dotprod",), ())
    ]
    assert found[0] == found[1]
