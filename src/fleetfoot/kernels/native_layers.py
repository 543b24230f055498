"""Consecutive decoder layers in one call of C: the kernels of `native_ops` in the same order, with the same bits,
without the time of some hundred calls in a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from fleetfoot.kernels.interface import LayerParts
from fleetfoot.kernels.native_blocks import NativeBlockLinear
from fleetfoot.kernels.native_ops import DTYPES, MAX_HEAD_DIM, NO_WINDOW, NativeLinear
from fleetfoot.native.loading import NativeLibrary
from fleetfoot.native.mappings import check_status
from fleetfoot.records.forward_context import ForwardContext


def _struct(name: str, pointers: str, numbers: str = "", floats: str = "") -> type[ctypes.Structure]:
    types = (ctypes.c_void_p, pointers), (ctypes.c_int64, numbers), (ctypes.c_double, floats)
    fields = [(field, kind) for kind, names in types for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Linear = _struct("_Linear", "weight bias", "num_outputs units num_parts")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("kv_cache", "cos_sin")),
        *((name, ctypes.c_int64) for name in ("max_positions", "window")),
    )


_Shape = _struct(
    "_Shape", "multiply_blocks", "num_layers hidden_size num_heads num_kv_heads head_dim dtype", "eps scale"
)
_Step = _struct(
    "_Step",
    "hidden residual slots positions query_start_loc seq_lens block_tables",
    "num_tokens num_requests table_stride table_width "
    "num_blocks block_stride side_stride head_stride token_stride block_size num_threads",
)


class NativeLayers:
    """See `LayerChain`."""

    def __init__(self, library: NativeLibrary, layers: Sequence[LayerParts]) -> None:
        first = layers[0]
        self._kernel, self._indices = library.decoder_layers, [layer.kv_index for layer in layers]
        self._multiply_blocks = ctypes.cast(library.block_linear, ctypes.c_void_p).value
        self._table = (_Layer * len(layers))(*map(_fields_of, layers))
        hidden_size = len(first.input_norm)
        self._head_dim = first.rotary.cos_sin.shape[1]
        self._num_kv_heads = (_fields_of(first).qkv.num_outputs // self._head_dim - first.num_heads) // 2
        self._dtype = first.input_norm.dtype
        shape = hidden_size, first.num_heads, self._num_kv_heads, self._head_dim, DTYPES[self._dtype]
        self._shape = *shape, first.eps, first.scale

    def __call__(
        self, x: torch.Tensor, ctx: ForwardContext, num_layers: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        metadata = ctx.shared_attention(self._indices)
        if metadata is None:  # layers of several groups are computed one by one
            return None
        caches = [ctx.kv_caches[index] for index in self._indices]
        cache, tables = caches[0], metadata.block_tables
        residual, hidden = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        for row, each in zip(self._table, caches, strict=True):
            row.kv_cache = each.data_ptr()
        num_tokens, block_size = len(x), cache.shape[3]
        expected = self._num_kv_heads, block_size, self._head_dim
        if (
            x.dtype is not self._dtype
            or cache.dtype is not self._dtype
            or any(each.shape[2:] != expected or each.stride() != cache.stride() for each in caches)
            or cache.stride(4) != 1
            or tables.stride(1) != 1
            or len(metadata.slot_mapping) != num_tokens
            or len(metadata.positions) != num_tokens
        ):
            raise ValueError(
                f"x {list(x.shape)} {x.dtype}, {len(metadata.slot_mapping)} slots and KV caches {list(cache.shape)} "
                f"{cache.dtype} with strides {cache.stride()} do not match layers of {expected} {self._dtype}"
            )
        step = _Step(
            hidden.data_ptr(), residual.data_ptr(), metadata.slot_mapping.data_ptr(), metadata.positions.data_ptr(),
            metadata.query_start_loc.data_ptr(), metadata.seq_lens.data_ptr(), tables.data_ptr(),
            num_tokens, metadata.num_reqs, tables.stride(0), tables.shape[1],
            cache.shape[0], *cache.stride()[:4], block_size, torch.get_num_threads(),
        )  # fmt: skip
        shape = _Shape(self._multiply_blocks, num_layers, *self._shape)
        pointers = (ctypes.addressof(each) for each in (self._table, shape, step))
        check_status(self._kernel(*pointers), "decoder_layers")
        return hidden, residual


def chain_layers(library: NativeLibrary, layers: Sequence[LayerParts]) -> NativeLayers | None:
    """See `Kernels.layer_chain`."""
    head_dim = layers[0].rotary.cos_sin.shape[1]
    is_supported = head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM and all(map(_is_native, layers))
    if not is_supported or len({(layer.shape, _fields_of(layer).qkv.num_outputs) for layer in layers}) > 1:
        return None  # layers that differ are computed one by one
    return NativeLayers(library, layers)


def _is_native(layer: LayerParts) -> bool:
    linears = layer.qkv, layer.o, layer.gate_up, layer.down
    is_plain = layer.rotary.eps == layer.eps and layer.rotary.kv_scales is None
    return is_plain and all(isinstance(linear, NativeLinear | NativeBlockLinear) for linear in linears)


def _fields_of(layer: LayerParts) -> _Layer:
    rotary = layer.rotary
    norms = (_pointer(each) for each in (layer.input_norm, layer.mlp_norm, rotary.q_norm, rotary.k_norm))
    linears = (_linear_fields(each) for each in (layer.qkv, layer.o, layer.gate_up, layer.down))
    window = NO_WINDOW if layer.window is None else layer.window
    return _Layer(*norms, *linears, None, rotary.cos_sin.data_ptr(), rotary.cos_sin.shape[0], window)


def _linear_fields(linear: Callable[[torch.Tensor], torch.Tensor]) -> ctypes.Structure:
    assert isinstance(linear, NativeLinear | NativeBlockLinear)
    return _Linear(*linear.fields)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
