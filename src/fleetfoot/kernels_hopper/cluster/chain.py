"""Decoder layers of a decode of few requests in two kernels each (``attention_block.cu``, ``mlp_block.cu``); see
`Kernels.layer_chain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from fleetfoot.kernels.elementwise import add_rms_norm_triton
from fleetfoot.kernels.interface import LayerParts
from fleetfoot.kernels.linear.linear import PlainLinear
from fleetfoot.kernels.runtime.cuda_source import CudaKernel, load
from fleetfoot.kernels_hopper.cluster.fit import max_context, max_rows
from fleetfoot.kernels_hopper.cluster.layer_blocks import (
    ATTENTION_BLOCK,
    MLP_BLOCK,
    LayerShape,
    LayerTiling,
    LayerWeights,
    StepBuffers,
    defines,
    layer_arguments,
    misfit,
    rows_of,
    shared_bytes,
)
from fleetfoot.records.forward_context import ForwardContext


class ClusterLayers:
    """See `LayerChain`. It computes decodes of up to ``max_rows`` requests with one token each and short contexts, with
    all layers."""

    def __init__(self, layers: Sequence[LayerParts], weights: Sequence[LayerWeights]) -> None:
        self._layers = [*zip(layers, weights, strict=True)]
        parts, first = layers[0], weights[0]
        self._head_dim = parts.rotary.cos_sin.shape[1]
        self._num_heads, self._hidden, self._intermediate = parts.num_heads, first.qkv.shape[1], first.down.shape[1]
        self._num_kv_heads = (first.qkv.shape[0] // self._head_dim - parts.num_heads) // 2
        self.max_rows = max_rows(self._hidden, self._num_kv_heads)
        self._caches = [each.kv_index for each in layers]

    def __call__(
        self, x: torch.Tensor, ctx: ForwardContext, num_layers: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        rows, metadata = len(x), ctx.shared_attention(self._caches)
        if metadata is None:
            return None
        is_decode = metadata.max_query_len == 1 and metadata.num_reqs == rows
        if num_layers < len(self._layers) or not is_decode or rows > self.max_rows:
            return None
        if metadata.max_seq_len > max_context(self._head_dim, self._num_kv_heads, rows_of(rows)):
            return None
        caches = [ctx.kv_caches[index] for index in self._caches]
        tiling, shape = LayerTiling(rows_of(rows)), self.shape(caches[0].shape[3])
        if not self._fits(x, caches, shape, tiling):
            return None
        attention_block, mlp_block = (load(kernel, x.device) for kernel in kernels_of(shape, tiling))
        if not (attention_block.fits and mlp_block.fits):
            return None
        buffers, source = StepBuffers(rows, self._hidden, tiling, x.device), x
        num_ctas = tiling.clusters * tiling.ctas, tiling.mlp_clusters * tiling.ctas
        for index, ((parts, weights), cache_) in enumerate(zip(self._layers, caches, strict=True)):
            first = layer_arguments(parts, weights, cache_, metadata, buffers, None if index else source)
            # the first one reads what the step's preparation writes, before it waits
            attention_block.launch(num_ctas[0], bytes(first[0]), dependent=index > 0)
            mlp_block.launch(num_ctas[1], bytes(first[1]), dependent=True)
        last = self._layers[-1][0]
        _, total = add_rms_norm_triton(buffers.partials[1], buffers.residuals[1], last.mlp_norm, last.eps)
        # a dry pass goes on with the other path, which steps take where these kernels do not fit
        return None if attention_block.is_dry else (total, total)

    def shape(self, block_size: int) -> LayerShape:
        """``block_size``: positions of a KV block."""
        heads = self._num_heads, self._num_kv_heads, self._head_dim
        return LayerShape(self._hidden, *heads, self._intermediate, block_size)

    def _fits(self, x: torch.Tensor, caches: Sequence[torch.Tensor], shape: LayerShape, tiling: LayerTiling) -> bool:
        expected = shape.num_kv_heads, shape.block_size, shape.head_dim
        return (
            x.dtype is torch.bfloat16
            and x.is_contiguous()
            and all(each.dtype is x.dtype and each.shape[2:] == expected for each in caches)
            and all(each.stride()[3:] == (shape.head_dim, 1) for each in caches)
            and _is_supported(shape, tiling)
        )


@cache
def _is_supported(shape: LayerShape, tiling: LayerTiling) -> bool:
    return misfit(shape, tiling) is None


@cache
def kernels_of(shape: LayerShape, tiling: LayerTiling) -> tuple[CudaKernel, CudaKernel]:
    """Those of a layer: attention, and the MLP. No cluster waits for another one, but where some start late the kernels
    are slower than those that they replace."""
    macros, sizes, clusters = defines(shape, tiling), shared_bytes(tiling), (tiling.clusters, tiling.mlp_clusters)
    attention_block, mlp_block = (
        CudaKernel(
            f"kernels_hopper/cluster/{function}.cu", function, macros, tiling.ctas, tiling.threads, size, at_once
        )
        for function, size, at_once in zip((ATTENTION_BLOCK, MLP_BLOCK), sizes, clusters, strict=True)
    )
    return attention_block, mlp_block


def chain_layers(layers: Sequence[LayerParts]) -> ClusterLayers | None:
    """See `Kernels.layer_chain`."""
    weights = [each for each in map(_weights, layers) if each is not None]
    if len(weights) < len(layers):
        return None
    shapes = {(layer.shape, each.qkv.shape, each.down.shape) for layer, each in zip(layers, weights, strict=True)}
    if len(shapes) > 1:  # layers that differ are computed one by one
        return None
    chain = ClusterLayers(layers, weights)
    return chain if chain.max_rows else None


def _weights(layer: LayerParts) -> LayerWeights | None:
    """The weights of a layer that the kernels compute; None: they do not."""
    linears, rotary = [_dense(each) for each in (layer.qkv, layer.o, layer.gate_up, layer.down)], layer.rotary
    has_norms = rotary.q_norm is not None
    if layer.window is not None or rotary.norm_offset or has_norms != (rotary.k_norm is not None):
        return None
    dense = [each for each in linears if each is not None]
    return LayerWeights(*dense) if len(dense) == len(linears) else None


def _dense(linear: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """The weight of a layer without a bias; None: it is not stored so."""
    if not isinstance(linear, PlainLinear) or linear.has_bias:
        return None
    weight = linear.weight()
    return weight if weight.dtype is torch.bfloat16 and weight.is_contiguous() else None
