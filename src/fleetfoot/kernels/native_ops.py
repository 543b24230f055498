"""The operations of layers and of sampling in C. Inputs that a kernel does not support (float16, other strides) go to
the torch reference."""

from __future__ import annotations

from functools import partial

import torch

from fleetfoot.kernels.attention.rope_and_cache import rope_and_cache_torch
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.elementwise import (
    add_rms_norm_torch,
    gelu_and_mul_torch,
    rms_norm_torch,
    silu_and_mul_torch,
)
from fleetfoot.kernels.experts.experts import ExpertSizes, Stacks, TorchExperts
from fleetfoot.kernels.linear.linear import PreparedLinear, check_replacement, prepare_linear_torch
from fleetfoot.kernels.sampling.sample import RandomRows, draw_filtered, mark_invalid, sample_cpu
from fleetfoot.native.loading import NativeLibrary, load_library
from fleetfoot.native.mappings import check_status
from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that the kernels support, and their codes."""
MAX_HEAD_DIM = 256
NO_WINDOW = 1 << 30  # longer than any sequence; fits in 32 bits with room to add positions


def rms_norm_native(
    library: NativeLibrary, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """See `Kernels.rms_norm`."""
    dtype, size = x.dtype, x.shape[-1]
    code = DTYPES.get(dtype)
    if code is None or not x.is_contiguous():
        return rms_norm_torch(x, weight, eps, offset)
    if not _is_norm(weight, size, dtype):
        raise ValueError(_mismatch("rms_norm", x=x, weight=weight))
    output = torch.empty_like(x)
    pointers = output.data_ptr(), x.data_ptr(), weight.data_ptr()
    library.rms_norm(*pointers, eps, offset, x.numel() // max(size, 1), size, code, torch.get_num_threads())
    return output


def add_rms_norm_native(
    library: NativeLibrary,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    output_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.add_rms_norm`."""
    dtype, size = x.dtype, x.shape[-1]
    code = DTYPES.get(dtype)
    is_single = code is None or not (x.is_contiguous() and residual.is_contiguous())
    if weight is None or is_single or offset or output_weight is not None:
        rms_norm = partial(rms_norm_native, library)
        return add_rms_norm_torch(x, residual, weight, eps, offset, output_weight, rms_norm=rms_norm)
    if residual.dtype is not dtype or residual.shape != x.shape or not _is_norm(weight, size, dtype):
        raise ValueError(_mismatch("add_rms_norm", x=x, residual=residual, weight=weight))
    output, total = torch.empty_like(x), torch.empty_like(x)
    pointers = output.data_ptr(), total.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    library.add_rms_norm(*pointers, eps, x.numel() // max(size, 1), size, code, torch.get_num_threads())
    return output, total


def silu_and_mul_native(library: NativeLibrary, gate_up: torch.Tensor) -> torch.Tensor:
    """See `Kernels.silu_and_mul`."""
    if gate_up.dtype not in DTYPES or not gate_up.is_contiguous():
        return silu_and_mul_torch(gate_up)
    return _activate(library, gate_up, "silu_and_mul", is_gelu=False)


def gelu_and_mul_native(library: NativeLibrary, gate_up: torch.Tensor) -> torch.Tensor:
    """See `Kernels.gelu_and_mul`."""
    if gate_up.dtype not in DTYPES or not gate_up.is_contiguous():
        return gelu_and_mul_torch(gate_up)
    return _activate(library, gate_up, "gelu_and_mul", is_gelu=True)


def _activate(library: NativeLibrary, gate_up: torch.Tensor, operation: str, *, is_gelu: bool) -> torch.Tensor:
    num_rows, width = gate_up.shape
    if width % 2:
        raise ValueError(_mismatch(f"{operation}: gate and up must be equally wide", gate_up=gate_up))
    output = torch.empty((num_rows, width // 2), dtype=gate_up.dtype)
    shape = num_rows, width // 2, DTYPES[gate_up.dtype], torch.get_num_threads()
    library.silu_and_mul(output.data_ptr(), gate_up.data_ptr(), *shape, is_gelu)
    return output


def rope_and_cache_native(
    library: NativeLibrary,
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    num_heads: int,
    rotary: RotaryInputs,
) -> torch.Tensor:
    """See `Kernels.rope_and_cache`."""
    dtype = qkv.dtype
    code = DTYPES.get(dtype)
    if code is None or rotary.kv_scales is not None:
        return rope_and_cache_torch(qkv, kv_cache, metadata, num_heads, rotary)
    slot_mapping, positions = metadata.slot_mapping, metadata.positions
    cos_sin, q_norm, k_norm = rotary.cos_sin, rotary.q_norm, rotary.k_norm
    num_tokens, width = qkv.shape
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    kv_stride, qkv_stride = kv_cache.stride(), qkv.stride()
    if (
        width != (num_heads + 2 * num_kv_heads) * head_dim
        or head_dim % 2
        or kv_cache.dtype is not dtype
        or qkv_stride[1] != 1
        or kv_stride[4] != 1
        or len(slot_mapping) != num_tokens
        or len(positions) != num_tokens
        or slot_mapping.dtype is not torch.int64
        or positions.dtype is not torch.int64
        or cos_sin.dtype is not torch.float32
        or cos_sin.shape[1] != head_dim
        or not cos_sin.is_contiguous()
        or not (q_norm is None or _is_norm(q_norm, head_dim, dtype))
        or not (k_norm is None or _is_norm(k_norm, head_dim, dtype))
    ):
        found = {"qkv": qkv, "kv_cache": kv_cache, "slot_mapping": slot_mapping, "positions": positions}
        raise ValueError(_mismatch("rope_and_cache", **found, cos_sin=cos_sin, q_norm=q_norm, k_norm=k_norm))
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype)
    status = library.rope_and_cache(
        query.data_ptr(), qkv.data_ptr(), qkv_stride[0], kv_cache.data_ptr(), num_blocks, *kv_stride[:4],
        slot_mapping.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[0],
        None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(), rotary.eps,
        rotary.norm_offset, num_tokens, num_heads, num_kv_heads, block_size, head_dim, code, torch.get_num_threads(),
    )  # fmt: skip
    check_status(status, "rope_and_cache")
    return query


class NativeBackend(SDPABackend):
    """Attention: prefills, chunks and decodes of a step in one call; unsupported shapes fall back to `SDPABackend`.

    The result of a token is bitwise identical for any batch, any chunking of its prompt and any number of threads.

    Raises:
        NativeUnavailableError: the library is missing, or has no such variant for this processor.
    """

    name = "native"

    def __init__(self, variant: str | None = None) -> None:
        self._kernel = load_library(variant).paged_attention

    def forward(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`. The output of tokens that belong to no request is zero.

        Raises:
            ValueError: the shapes or dtypes do not match, or the metadata points outside of a tensor.
        """
        dtype = query.dtype
        num_tokens, num_heads, head_dim = query.shape
        num_blocks, _, num_kv_heads, block_size, kv_head_dim = kv_cache.shape
        if dtype not in DTYPES or head_dim % 16 or not 0 < head_dim <= MAX_HEAD_DIM or sinks is not None:
            return super().forward(query, kv_cache, metadata, scale, window, soft_cap, sinks, kv_scales)
        block_tables = metadata.block_tables
        query_stride, kv_stride, table_stride = query.stride(), kv_cache.stride(), block_tables.stride()
        if (
            query_stride[1:] != (head_dim, 1)
            or kv_stride[4] != 1
            or table_stride[1] != 1
            or head_dim != kv_head_dim
            or num_heads % num_kv_heads
            or (kv_cache.dtype != dtype if kv_scales is None else kv_cache.element_size() != 1)
        ):
            raise ValueError(
                f"query {list(query.shape)} {dtype} with strides {query_stride} does not match the KV cache "
                f"{list(kv_cache.shape)} {kv_cache.dtype} with strides {kv_stride}"
            )
        output = torch.empty(query.shape, dtype=dtype)
        values = None  # [2, 256]: what each byte of K and of V stands for
        if kv_scales is not None:
            codes = torch.arange(256, dtype=torch.uint8).view(kv_cache.dtype).float()
            values = (kv_scales[:, None] * codes).to(dtype)
        status = self._kernel(
            output.data_ptr(), query.data_ptr(), query_stride[0], num_tokens, kv_cache.data_ptr(), num_blocks,
            *kv_stride[:4], metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr(), block_tables.data_ptr(),
            table_stride[0], block_tables.shape[1], metadata.num_reqs, num_heads, num_kv_heads, block_size, head_dim,
            scale, soft_cap or 0.0, NO_WINDOW if window is None else window, DTYPES[dtype],
            torch.get_num_threads(), None if values is None else values.data_ptr(),
        )  # fmt: skip
        check_status(status, "paged_attention")
        return output


def prepare_linear_native(
    library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> PreparedLinear:
    """`NativeLinear` if it supports the dtype and is the fastest implementation, otherwise the torch implementation."""
    is_odd = weight.dtype is torch.bfloat16 and weight.shape[1] % 2
    if weight.dtype not in DTYPES or weight.numel() == 0 or is_odd:
        return prepare_linear_torch(weight, bias)
    return NativeLinear(weight, bias, library)


class NativeLinear:
    """``x [n, in]`` -> ``[n, out]``. Only the packed copy of the weight is kept.

    Each output is one float32 sum over the inputs in order, so a row's result does not depend on ``n`` or on the number
    of threads.
    """

    __slots__ = (
        "_bias", "_bias_pointer", "_code", "_dtype", "_kernels", "_packed", "_shape", "_units", "_values_per_unit",
    )  # fmt: skip
    is_dense = False
    has_rows = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: NativeLibrary) -> None:
        """Args:
        weight: ``[out, in]`` float32, or bfloat16 with an even ``in``.

        Raises:
            ValueError: the bias is not ``[out]`` of the same dtype.
        """
        num_outputs, num_inputs = weight.shape
        self._shape, self._dtype, self._code = weight.shape, weight.dtype, DTYPES[weight.dtype]
        if bias is not None and (bias.shape != (num_outputs,) or bias.dtype != weight.dtype):
            raise ValueError(
                f"bias {list(bias.shape)} {bias.dtype} does not match a weight {list(weight.shape)} {weight.dtype}"
            )
        self._bias = None if bias is None else bias.contiguous()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._kernels = kernels
        self._values_per_unit = 4 // weight.element_size()
        self._units = num_inputs // self._values_per_unit
        panel = kernels.panel_width()
        num_panels = -(-num_outputs // panel)
        self._packed = torch.empty(num_panels * panel * self._units, dtype=torch.int32)  # [panels, units, panel]
        self._pack(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self._dtype)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """See `PreparedLinear.unrounded`: float32."""
        return self._multiply(x, torch.float32)

    def _multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        num_rows, num_inputs = x.shape
        num_outputs = self._shape[0]
        if x.dtype is not self._dtype or num_inputs != self._shape[1]:
            raise ValueError(f"x {list(x.shape)} {x.dtype} does not match a weight {list(self._shape)} {self._dtype}")
        stride = x.stride()
        if stride[1] != 1 or (self._values_per_unit == 2 and (stride[0] % 2 or x.data_ptr() % 4)):
            x = x.clone(memory_format=torch.contiguous_format)
            stride = x.stride()
        output = torch.empty((num_rows, num_outputs), dtype=dtype)
        status = self._kernels.linear_to(
            output.data_ptr(), dtype is torch.float32, x.data_ptr(), stride[0] // self._values_per_unit,
            self._packed.data_ptr(), self._bias_pointer, num_rows, num_outputs, self._units, self._code,
            torch.get_num_threads(),
        )  # fmt: skip
        check_status(status, "linear")
        return output

    def weight(self) -> torch.Tensor:
        weight = torch.empty(self._shape, dtype=self._dtype)
        pointers = weight.data_ptr(), self._packed.data_ptr()
        self._kernels.unpack_linear(*pointers, self._shape[0], self._units, torch.get_num_threads())
        return weight

    @property
    def fields(self) -> tuple[int, int | None, int, int]:
        """Addresses of the packed weight, which stays when it is replaced, and of the bias; outputs and units."""
        return self._packed.data_ptr(), self._bias_pointer, self._shape[0], self._units

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        output = torch.empty((len(index), self._shape[1]), dtype=self._dtype)
        status = self._kernels.linear_rows(
            output.data_ptr(), self._packed.data_ptr(), index.contiguous().data_ptr(), len(index), self._shape[0],
            self._units, torch.get_num_threads(),
        )  # fmt: skip
        if status:
            raise IndexError(f"a row of a weight {list(self._shape)} is out of range: {index.min()} .. {index.max()}")
        return output

    def stored(self) -> tuple[int, int]:
        return self._packed.data_ptr(), self._packed.nbytes

    def replace(self, weight: torch.Tensor) -> None:
        check_replacement(weight, self._shape, self._dtype)
        self._pack(weight)

    def _pack(self, weight: torch.Tensor) -> None:
        source = weight.contiguous()
        pointers, units = (self._packed.data_ptr(), source.data_ptr()), self._units
        self._kernels.pack_linear(*pointers, units, self._shape[0], units, torch.get_num_threads())


class NativeExperts(TorchExperts):
    """Experts with packed matrices, of which each product reads those of the chosen ones once."""

    def __init__(self, library: NativeLibrary, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device) -> None:
        self._kernels = library
        super().__init__(sizes, dtype, device)

    def _allocate(self) -> None:
        panel, values_per_unit = self._kernels.panel_width(), 4 // self.dtype.itemsize
        self._open: dict[str, dict[int, torch.Tensor]] = {name: {} for name in self.shapes}
        self._filled: set[tuple[str, int]] = set()
        self._units = {name: shape[1] // values_per_unit for name, shape in self.shapes.items()}
        self.matrices = {
            name: torch.empty(
                self.sizes.num_experts, -(-shape[0] // panel) * panel * self._units[name], dtype=torch.int32
            )
            for name, shape in self.shapes.items()
        }

    def open(self, matrix: str, expert: int | None = None) -> torch.Tensor:
        """See `TorchExperts.open`: a plain copy, until `close` packs it."""
        opened, shape = self._open[matrix], self.shapes[matrix]
        if expert is None:
            stacked = torch.empty(self.sizes.num_experts, *shape, dtype=self.dtype)
            for index, plain in enumerate(stacked):
                plain.copy_(self.open(matrix, index))
                opened[index] = plain
            return stacked
        if expert not in opened:
            opened[expert] = plain = torch.empty(shape, dtype=self.dtype)
            if (matrix, expert) in self._filled:
                pointers = plain.data_ptr(), self.matrices[matrix][expert].data_ptr()
                self._kernels.unpack_linear(*pointers, shape[0], self._units[matrix], torch.get_num_threads())
        return opened[expert]

    def close(self, expert: int | None = None) -> None:
        for matrix, opened in self._open.items():
            units, num_outputs = self._units[matrix], self.shapes[matrix][0]
            for index in [*opened] if expert is None else [expert] * (expert in opened):
                plain = opened.pop(index)  # which lives until it is packed
                pointers = self.matrices[matrix][index].data_ptr(), plain.data_ptr()
                self._kernels.pack_linear(*pointers, units, num_outputs, units, torch.get_num_threads())
                self._filled.add((matrix, index))

    def _linear(self, x: torch.Tensor, matrix: str, expert: int) -> torch.Tensor:
        """As `NativeLinear`, in float32 where nothing follows."""
        bias, num_outputs = self.biases[matrix], self.shapes[matrix][0]
        is_last = matrix == "down"
        output = torch.empty((len(x), num_outputs), dtype=torch.float32 if is_last else self.dtype)
        status = self._kernels.linear_to(
            output.data_ptr(), is_last or self.dtype is torch.float32, x.data_ptr(), self._units[matrix],
            self.matrices[matrix][expert].data_ptr(), None if bias is None else bias[expert].data_ptr(), len(x),
            num_outputs, self._units[matrix], DTYPES[self.dtype], torch.get_num_threads(),
        )  # fmt: skip
        check_status(status, "linear")
        return output

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.sizes.activation == "silu" and not self.sizes.is_interleaved:
            return silu_and_mul_native(self._kernels, gate_up)
        return super()._activate(gate_up)


def experts_native(
    library: NativeLibrary, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device, stacks: Stacks | None = None
) -> TorchExperts:
    """`NativeExperts` where the kernels support the sizes and the dtype, and weights are not quantized."""
    is_odd = dtype is torch.bfloat16 and (sizes.hidden_size % 2 or sizes.size % 2)
    if dtype not in DTYPES or is_odd or stacks is not None:
        return TorchExperts(sizes, dtype, device, stacks)
    return NativeExperts(library, sizes, dtype, device)


def sample_native(
    library: NativeLibrary,
    logits: torch.Tensor,
    random: RandomRows | None = None,
    *,
    invalid: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Kernels.sample`."""
    code = DTYPES.get(logits.dtype)
    num_rows, vocab_size = logits.shape
    stride = logits.stride()
    if code is None or stride[1] != 1 or vocab_size == 0:
        return sample_cpu(logits, random, invalid=invalid, out=out)
    per_row: list[torch.Tensor] = []
    pointers: list[int | None] = [None] * 3
    if random is not None:
        random = random.gathered()
        per_row = [random.temperatures, random.seeds, random.positions.to(torch.int64)]
        if [(tensor.dtype, len(tensor)) for tensor in per_row] != [
            (dtype, num_rows) for dtype in (torch.float32, torch.int64, torch.int64)
        ]:
            found = dict(zip(("temperatures", "seeds", "positions"), per_row, strict=True))
            raise ValueError(_mismatch("sample", logits=logits, **found))
        per_row = [tensor.contiguous() for tensor in per_row]
        pointers = [tensor.data_ptr() for tensor in per_row]
    token_ids = torch.empty(num_rows, dtype=torch.int64) if out is None else out
    status = library.sample(
        token_ids.data_ptr(), logits.data_ptr(), stride[0], num_rows, vocab_size, *pointers, code,
        torch.get_num_threads(),
    )  # fmt: skip
    check_status(status, "sample")
    if random is not None:
        draw_filtered(token_ids, logits, random)
    if invalid is not None:
        mark_invalid(logits, token_ids, invalid)
    return token_ids


def _is_norm(weight: torch.Tensor, size: int, dtype: torch.dtype) -> bool:
    return weight.dtype is dtype and weight.shape == (size,) and weight.is_contiguous()


def _mismatch(operation: str, **tensors: torch.Tensor | None) -> str:
    found = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in tensors.items() if t is not None)
    return f"{operation}: tensors that do not fit together: {found}"
