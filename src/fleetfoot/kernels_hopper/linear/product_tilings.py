"""Selects the tiles of ``decode_product.cu``, the linear layers of 17 to 256 rows with norms on their two sides, and of
``gated_product.cu``, gate and up of more rows, or with tiles that use the multiprocessors better."""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.kernels.linear.choices import ProductKind
from fleetfoot.kernels.runtime.row_buckets import chosen_by_rows
from fleetfoot.kernels.runtime.triton_support import cdiv, options_text

_FEWEST_ROWS, _MIN_SHARE_OF_FEW, _LARGE_HIDDEN = 17, 0.7, 2048
"""Up to 32 rows layers of that hidden size and larger ones need that share of thread blocks. On an H200, ms a token of
64, 32 and 16 requests, without and with this kernel: Llama-3.1-8B 5.25 and 4.80, 4.64 and 4.56, 4.39 and 4.42; Qwen3-4B
(58%) 3.96 and 3.48, 3.23 and 3.32, 2.89 and 3.27; Llama-3.2-1B (97%) 1.12 and 1.09, 1.04 and 0.98, 0.95 and 0.99. With
24 requests: Qwen2.5-3B (65%) 2.475 and 2.532, Qwen2.5-1.5B (hidden size 1,536, 53%) 1.519 and 1.457."""
CHUNK = 64
"""Inputs that are multiplied at a time."""
_MOST_HIDDEN_OF_MANY = 2048
"""Maximum hidden size for more than 128 rows: Llama-3.1-8B takes 212 us a layer with this kernel, 183 without."""
_MOST_HIDDEN_BESIDE_ATTENTION = 1024
"""Maximum hidden size for `ProductTiling.beside_attention`. On an H200, us a layer of 256 requests without and with it:
Qwen3-0.6B with 320 tokens each 113.5 and 112.3, with 100 to 1,200 tokens 195.3 and 193.6; Qwen3-1.7B with 320 tokens
each 146.3 and 147.9: fewer stages make its product 1.1 us slower."""
_MIN_SHARE, _MIN_SHARE_OF_ROUNDS = 0.3, 0.7
"""Smallest share of the multiprocessors with a thread block; of gate and up for more than 64 rows, in each round."""
_SHARED_BYTES = 232448
"""Shared memory of a thread block, at most."""
_BARRIER_BYTES = 1024 + 512  # with what aligns the ring
_RESERVED_BYTES = 1024  # of a multiprocessor, for each of its thread blocks
_FEW_ROUNDS_ROWS = 512
"""Up to so many rows, the width of a tile of gate and up decides on the rounds of tiles."""
_BOUND_REUSE = 80
"""Products of a tile for each value that is copied to shared memory, below which copies bound it. With tiles that use
97% of an H100, us of Llama-3.1-8B with 512 rows: 128 x 128 (64) 196, 224 x 128 (81) 165, 224 x 256 (119) 159."""
_LIBRARY_SPEED, _ACTIVATION_INPUTS = 0.89, 360
"""The rate of the library's product, as `GatedTiling.speed`; and the inputs with which the activation, 6 bytes of
memory for each output, takes as long as the product."""
_MIN_EFFICIENCY_OF_FEW, _MIN_GAIN_OF_FEW = 0.9, 0.1
"""Up to 128 rows: of ``gated_product.cu``, and how much more than that of ``decode_product.cu``."""
_WIDEST_OF_FEW, _WIDE_INPUTS, _WIDEST_OF_MANY_INPUTS = 224, 4096, 96
"""Up to 128 rows, the outputs of a tile of ``gated_product.cu``, at most; with more inputs than ``_WIDE_INPUTS``, too.
On an H200, us a layer of Qwen3-14B (5120 inputs) with 64 rows: 189.7 with 96 outputs, 205.3 with 144, and without this
kernel 200.9."""


@dataclass(frozen=True, slots=True)
class ProductTiling:
    """Compile-time constants of ``decode_product.cu``."""

    rows: int
    """Rows of the input in a tile: 64, 128 or 256."""
    outputs: int
    """Rows of the weight in a tile: 64 or 128; gated: gates and ups, half and half, also 256."""
    splits: int = 1
    """Ranges of the inputs: thread blocks of a cluster. 1 unless the product is added to the residual."""
    peers: int = 1
    """Tiles of rows that share the copies of a weight: thread blocks of a cluster. 1 with splits."""
    beside_attention: bool = False
    """Leave room on a multiprocessor for a program of decode attention beside the thread block, which copies K and V of
    earlier positions while the product runs. For kind ``qkv`` with tiles of 64 rows, without peers."""

    def stages(self, num_inputs: int, head_dim: int = 0) -> int:
        """Stages of the pipeline. ``head_dim``: for kind ``qkv``."""
        room = _SHARED_BYTES - self._fixed_bytes(head_dim)
        if self.beside_attention:
            room -= attention_bytes(head_dim) + _RESERVED_BYTES
        return min(room // ((self.rows + self.outputs) * CHUNK * 2), num_inputs // CHUNK // self.splits, 16)

    def shared_bytes(self, num_inputs: int, head_dim: int = 0) -> int:
        """Shared memory of a thread block."""
        stages = self.stages(num_inputs, head_dim)
        return self._fixed_bytes(head_dim) + stages * (self.rows + self.outputs) * CHUNK * 2

    def _fixed_bytes(self, head_dim: int) -> int:
        """Other than stages: sums of other thread blocks, or angles of rotations."""
        angles = self.rows * (head_dim * 4 + 16) if head_dim and not self.beside_attention else 0
        return _BARRIER_BYTES + angles + (self.rows * self.outputs * 4 if self.splits > 1 else 0)

    @property
    def registers(self) -> int:
        """Registers of a thread, at most. Each quarter of a multiprocessor has 16,384 of them for its warps."""
        if self.beside_attention:
            return 128  # as many as a thread of attention
        return 96 if self.rows == 256 else 232 if self.outputs == 256 else 168

    @property
    def run(self) -> int:
        """Contiguous pairs of outputs of a thread."""
        return 2 if self.outputs // 8 // self.splits % 4 else 4

    def text(self, num_inputs: int, head_dim: int = 0) -> str:
        """See `Tiling.text`."""
        options = {"stages": self.stages(num_inputs, head_dim), "splits": self.splits, "peers": self.peers}
        beside = " beside attention" if self.beside_attention else ""
        return f"decode_product {self.outputs}x{CHUNK}x{self.rows}{options_text(options)}{beside}"

    def row_tiles(self, num_rows: int) -> int:
        """Tiles of rows, those without rows included."""
        return cdiv(num_rows, self.rows * self.peers) * self.peers


def attention_bytes(head_dim: int) -> int:
    """Shared memory of a program of decode attention on Hopper, at most: three tiles of K and V of 64 positions, and
    what is next to them."""
    return 3 * 64 * head_dim * 4 + 4892


@chosen_by_rows
def product_tiling(
    num_rows: int, kind: ProductKind, num_weight_rows: int, num_inputs: int, num_sms: int
) -> ProductTiling | GatedTiling | None:
    """The tiling of a product; None: kernels without norms are as fast, or the kernels do not support it. A
    `GatedTiling` is one of kind ``gated`` for up to 128 rows.

    The rules are those of measurements on an H200 with Qwen3-0.6B, Llama-3.2-1B and Llama-3.1-8B.
    """
    if not _FEWEST_ROWS <= num_rows <= 256 or num_inputs % (4 * CHUNK) or num_inputs < 512 or num_weight_rows % 128:
        return None
    if kind == "gated" and num_rows <= 128:
        narrow = _decode_tiling(kind, num_rows, num_weight_rows, num_inputs, num_sms)
        return _wide_tiling_of_few(num_rows, num_weight_rows, num_inputs, num_sms, narrow) or narrow
    return _decode_tiling(kind, num_rows, num_weight_rows, num_inputs, num_sms)


def _decode_tiling(
    kind: ProductKind, num_rows: int, num_weight_rows: int, num_inputs: int, num_sms: int
) -> ProductTiling | None:
    """The tiling of ``decode_product.cu``."""
    hidden = num_weight_rows if kind == "residual" else num_inputs
    if num_rows <= 64:
        min_share = _MIN_SHARE_OF_FEW if num_rows <= 32 and hidden >= _LARGE_HIDDEN else _MIN_SHARE
        return _one_row_tile(kind, num_weight_rows, num_sms, min_share)
    few = num_rows <= 128
    if not few and hidden > _MOST_HIDDEN_OF_MANY:
        return None
    if kind == "qkv":
        beside_attention = not few and hidden <= _MOST_HIDDEN_BESIDE_ATTENTION
        tiling = ProductTiling(64, 128, peers=2 if few else 1, beside_attention=beside_attention)
    elif kind == "gated":
        narrow = 2 * (num_weight_rows // 128) <= num_sms  # two tiles of rows fit
        if few:
            tiling = ProductTiling(64, 128, peers=2) if narrow else ProductTiling(128, 128)
        else:
            tiling = ProductTiling(128, 128, peers=2) if narrow else ProductTiling(256, 128)
    elif num_weight_rows > 1024:
        tiling = ProductTiling(128, 64, splits=2)
    elif few and num_inputs >= 3072:
        tiling = ProductTiling(128, 64, splits=4)
    elif num_rows <= 192:
        tiling = ProductTiling(64, 128, splits=4)
    else:
        tiling = ProductTiling(64, 64, splits=2)
    blocks = tiling.row_tiles(num_rows) * (num_weight_rows // tiling.outputs) * tiling.splits
    if kind == "gated":
        rounds = -(-blocks // num_sms)
        return tiling if blocks >= _MIN_SHARE_OF_ROUNDS * rounds * num_sms else None
    return tiling if _MIN_SHARE * num_sms <= blocks <= num_sms else None


def _one_row_tile(kind: ProductKind, num_weight_rows: int, num_sms: int, min_share: float) -> ProductTiling | None:
    """The tiling of up to 64 rows with the most thread blocks that run at once, since reading the weight bounds it."""
    shapes = {
        "qkv": ((128, 1),),
        "gated": ((256, 1), (128, 1), (64, 1)),
        "residual": ((64, 2), (64, 4), (128, 2), (128, 4)),
    }[kind]
    blocks = {
        ProductTiling(64, outputs, splits): num_weight_rows // outputs * splits
        for outputs, splits in shapes
        if num_weight_rows % outputs == 0 and num_weight_rows // outputs * splits <= num_sms
    }
    best = max(blocks, key=lambda tiling: blocks[tiling], default=None)
    return best if best is not None and blocks[best] >= min_share * num_sms else None


@dataclass(frozen=True, slots=True)
class GatedTiling:
    """Compile-time constants of ``gated_product.cu``."""

    rows: int
    """Rows of the input in a tile: 64, 128, 192 or 256."""
    outputs: int
    """Rows of the weight in a tile: gates and ups, half and half."""
    peers: int = 2
    """Neighboring tiles that share the copies of rows: thread blocks of a cluster."""

    @property
    def groups(self) -> int:
        """Warp groups: as many as have enough registers for their sums."""
        return 2 if self.rows == 256 else self.rows // 64

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return min((_SHARED_BYTES - self._fixed_bytes) // self._stage_bytes, 8)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block."""
        return self._fixed_bytes + self.stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + self.outputs) * CHUNK * 2

    @property
    def _fixed_bytes(self) -> int:
        """Other than stages: results on their way to memory."""
        pitch = self.outputs + (16 if self.outputs % 32 == 0 else 0)
        return _BARRIER_BYTES + self.groups * 4 * 16 * pitch

    def text(self, num_inputs: int, head_dim: int = 0) -> str:
        """See `Tiling.text`."""
        return f"gated_product {self.outputs}x{CHUNK}x{self.rows} stages={self.stages}"

    def speed(self, num_rows: int, num_outputs: int, num_sms: int) -> float:
        """Estimated share of the fastest rate of products that the rows and outputs that exist get."""
        reuse = self.rows * self.outputs / (self.rows + self.outputs)
        return self.efficiency(num_rows, num_outputs, num_sms) * min(reuse / _BOUND_REUSE, 0.85 + reuse / 800)

    def efficiency(self, num_rows: int, num_outputs: int, num_sms: int) -> float:
        """Share of the multiprocessors' time that is spent on rows and outputs that exist, by estimate."""
        num_tiles = cdiv(num_rows, self.rows) * cdiv(num_outputs, self.outputs // 2 * self.peers)
        rounds = cdiv(num_tiles, num_sms // self.peers)
        return num_rows * num_outputs / (rounds * num_sms * self.rows * (self.outputs // 2))


_MANY_ROWS = tuple(GatedTiling(*sizes) for sizes in ((256, 192), (256, 176), (192, 192), (128, 224), (256, 128)))
"""Kernels for any number of rows beyond ``_FEW_ROUNDS_ROWS``: few, since each is compiled. By `GatedTiling.speed` they
are within 1.3% of the best of 21, on average over public models and numbers of rows; the first two alone 4.4%."""


def _wide_tiling_of_few(
    num_rows: int, num_weight_rows: int, num_inputs: int, num_sms: int, narrow: ProductTiling | None
) -> GatedTiling | None:
    """The tiling of gate and up of up to 128 rows, if it uses the multiprocessors better than ``narrow``.

    On an H200, us a layer with 64 and 96 rows without it and with it: Llama-3.1-8B (85% and 97%) 127.7 and 122.4, 144.6
    and 136.9; Qwen3-4B (58% and 92%) 77.2 and 67.8, 82.6 and 76.0; Qwen2.5-7B 145.4 and 134.5, 164.3 and 151.3. Where
    it does not, it takes up to 1% more, Llama-3.2-3B with 128 rows 75.0 and 76.0.
    """
    rows = 64 if num_rows <= 64 else 128
    widest = _WIDEST_OF_FEW if num_inputs <= _WIDE_INPUTS else _WIDEST_OF_MANY_INPUTS
    efficiency = {
        tiling: tiling.efficiency(rows, num_weight_rows // 2, num_sms)
        for tiling in (GatedTiling(rows, outputs) for outputs in range(widest, 95, -16))
    }
    best = max(efficiency, key=lambda tiling: efficiency[tiling])  # of equal ones the widest
    share = 0.0
    if narrow is not None:
        blocks = narrow.row_tiles(num_rows) * (num_weight_rows // narrow.outputs)
        share = blocks / (cdiv(blocks, num_sms) * num_sms)
    return best if efficiency[best] >= max(_MIN_EFFICIENCY_OF_FEW, share + _MIN_GAIN_OF_FEW) else None


@chosen_by_rows
def gated_tiling(num_rows: int, num_weight_rows: int, num_inputs: int, num_sms: int) -> GatedTiling | None:
    """The tiling of gate and up for many rows; None: others are as fast, or it is not supported.

    A tile's rate follows from its shape, and the time from the rounds of tiles (`GatedTiling.speed`). The library's
    product has a rate of its own, and another kernel reads both halves of its output and writes a third. On an H100, us
    of the library and of the tiling that is selected: Qwen3-0.6B 640 rows 17.7 and 16.0, 3,200 rows 84.0 and 60.3;
    Llama-3.2-1B 1,152 rows 119.8 and 105.8; Llama-3.1-8B 640 rows 224.7 and 203.3, 2,080 rows 742 and 628.
    """
    if num_rows <= 128 or num_inputs % CHUNK or num_inputs < 512 or num_weight_rows % 32:
        return None
    num_outputs = num_weight_rows // 2
    tilings = _MANY_ROWS
    if num_rows <= _FEW_ROUNDS_ROWS:
        tilings = tuple(GatedTiling(rows, outputs) for rows in (256, 192, 128) for outputs in range(224, 127, -16))
    speed = {tiling: tiling.speed(num_rows, num_outputs, num_sms) for tiling in tilings}
    best = max(tilings, key=lambda tiling: speed[tiling])  # of equal ones the first
    return best if speed[best] >= _LIBRARY_SPEED / (1 + _ACTIVATION_INPUTS / num_inputs) else None
