"""Which kernel multiplies with a matrix on a Hopper GPU."""

from __future__ import annotations

from functools import cache

from fleetfoot.kernels.linear.choices import LinearChoices
from fleetfoot.kernels.linear.tilings import Tiling, choose_tiling
from fleetfoot.kernels.runtime.row_buckets import row_bucket
from fleetfoot.kernels_hopper.linear.product_tilings import GatedTiling, ProductTiling, gated_tiling, product_tiling
from fleetfoot.kernels_hopper.linear.tilings import choose_hopper_tiling


class HopperChoices(LinearChoices):
    """`LinearChoices`, and the kernels in Gluon and CUDA C++. ``has_products``: False: there is no compiler for the
    latter, or they do not read this weight."""

    has_products = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._products = cache(self._product)

    def _tiling(self, rows: int) -> Tiling | None:
        if self.dtype not in ("bfloat16", "float16"):
            return None
        is_plain = not self.has_bias and self.scale == 1.0 and not (self.is_gated and self.activation != "silu")
        choose, sizes = choose_hopper_tiling if is_plain else choose_tiling, (rows, self.num_outputs, self.num_inputs)
        return choose(*sizes, gated=self.is_gated, may_split=self.kind == "residual", limits=self.limits)

    def product(self, rows: int) -> ProductTiling | GatedTiling | None:
        """The product with norms on its two sides; None: there is none."""
        return self._products(row_bucket(rows))

    def _product(self, rows: int) -> ProductTiling | GatedTiling | None:
        if self.kind is None or self.dtype != "bfloat16" or self.scale != 1.0 or not self.has_products:
            return None
        if (self.is_gated and self.activation != "silu") or (self.has_bias and self.kind != "qkv"):
            return None
        if self.kind == "qkv" and self.head_dim not in (64, 128):
            return None
        return product_tiling(rows, self.kind, self.num_rows, self.num_inputs, self.limits.num_sms)

    def gated(self, rows: int) -> GatedTiling | None:
        """Gate and up without norms; None: `tiling`, or the library."""
        if not self.is_gated or self.has_bias or self.dtype != "bfloat16" or not self.has_products:
            return None
        return gated_tiling(rows, self.num_rows, self.num_inputs, self.limits.num_sms)

    def reads_norm(self, rows: int) -> bool:
        return super().reads_norm(rows) or self.product(rows) is not None

    def text(self, rows: int) -> str:
        wide = self.gated(rows)
        return super().text(rows) if wide is None else wide.text(self.num_inputs)

    def text_with_norms(self, rows: int) -> str:
        product = self.product(rows)
        if product is None:
            return super().text_with_norms(rows)
        return product.text(self.num_inputs, self.head_dim if self.kind == "qkv" else 0)

    def rotates(self, rows: int) -> bool:
        return self.kind == "qkv" and self.product(rows) is not None
