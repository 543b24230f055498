"""How `fleetfoot.kernels.attention.decode` is compiled and launched."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.kernels.runtime.gpu_limits import fit_tile

MAX_ROWS = 64
"""Most query heads per KV head times query tokens per request; see `most_rows`."""
MIN_ROWS = 16
"""Rows that are computed where there are fewer: the tensor cores' least."""
PAIR_TILES = 4
"""What a (request, KV head) pair costs before its first tile, as tiles: its query, and what it waits for. On an H100 a
step of 256 requests of 3 to 300 tokens takes 1.80 ms with 4, 1.85 with 2, 2.04 with 1 and 2.76 with none."""


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How the kernel is compiled and launched; see `choose_decode_tiling`."""

    tile: int
    """KV positions in a tile."""
    min_tiles: int
    """Fewest tiles for a program: merging costs more than so many tiles do."""
    full_tiles: int
    """Tiles that every program has before a multiprocessor gets another program: merging costs by their number."""
    pair_tiles: int
    """What a pair costs besides its tiles; counted where programs get several pairs."""
    programs_per_sm: int
    """Programs of a launch for each multiprocessor. As many fit there at once, so that all get the same share."""
    num_warps: int
    num_stages: int

    @property
    def max_registers(self) -> int:
        """Of a thread, so that ``programs_per_sm`` fit in 65,536."""
        return min(255, 65536 // (self.programs_per_sm * self.num_warps * 32) // 8 * 8)


def choose_decode_tiling(
    rows: int, padded_dim: int, element_size: int, shared_bytes: int, *, is_fused: bool = False
) -> DecodeTiling:
    """Small tiles for many programs, whose waits overlap: on an H100, four programs with tiles of 8 KB take 20% off a
    step of 64 or 256 short requests and 4 to 12% off one of 8 or 64 long ones, against three with tiles of 16 KB. One
    warp, more programs, or fewer stages lose. Four warps take up to 4% off what two need, but spill registers where
    the kernel norms and rotates.

    Args:
        rows: of the query tile. padded_dim: head_dim, rounded up to a power of 2.
        shared_bytes: most shared memory of a program.
        is_fused: the kernel norms, rotates and writes K and V itself.
    """
    row_bytes = padded_dim * element_size
    # More rows take all the registers that a thread may have.
    is_small = rows == MIN_ROWS
    tile_bytes, num_warps, most_programs = (8192, 2 if is_fused else 4, 4) if is_small else (16384, 4, 2)
    tile, num_stages = fit_tile(rows, max(16, min(128, tile_bytes // row_bytes)), row_bytes, shared_bytes)
    programs_per_sm = max(1, min(most_programs, shared_bytes // ((rows + 4 * tile) * row_bytes)))
    return DecodeTiling(
        tile,
        min_tiles=1,
        full_tiles=4 if is_small else 8,
        pair_tiles=PAIR_TILES,
        programs_per_sm=programs_per_sm,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def most_rows(head_dim: int) -> int:
    """Most query heads per KV head times query tokens per request whose accumulator the registers hold."""
    return MAX_ROWS if head_dim <= 128 else MAX_ROWS // 2
