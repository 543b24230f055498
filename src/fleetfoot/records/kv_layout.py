"""The KV cache in memory: what a layer keeps, groups of layers, and the tensors, for attention, memory plans, the
scheduler and connectors."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import msgspec

from fleetfoot.config.model import DTYPE_BYTES, ModelConfig
from fleetfoot.config.sharding import num_kv_heads

if TYPE_CHECKING:
    import torch

ARENA = "arena"
"""One tensor: a block is contiguous over all layers of its group, the parts of the layers one after the other. Each
part has the dimensions of `BLOCK_CONTIGUOUS_HND`."""
BLOCK_CONTIGUOUS_HND = "block-contiguous-hnd"
"""A tensor for each layer: a block is contiguous, and within it so are the tokens of a head, in the order in which
attention reads them."""
TOKEN_MAJOR_NHD = "token-major-nhd"
"""A tensor for each layer: K of all blocks, then V of all blocks; the heads of a token are contiguous."""
_PART = ("key_and_value", "num_kv_heads", "block_size", "head_dim")
LAYOUT_DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    ARENA: ("num_blocks", "num_layers", *_PART),
    BLOCK_CONTIGUOUS_HND: ("num_blocks", *_PART),
    TOKEN_MAJOR_NHD: ("key_and_value", "num_blocks", "block_size", "num_kv_heads", "head_dim"),
}
"""The dimensions of a tensor, outermost first. The layers of an arena may differ in heads and head size."""


class KVCacheSpec(msgspec.Struct, frozen=True, tag=True):
    """What one layer with attention keeps on one rank: K and V of each token."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that attention reads, the current one included; None: all."""

    def shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of the layer's part of a block: ``[2, num_kv_heads, block_size, head_dim]``."""
        return 2, self.num_kv_heads, block_size, self.head_dim

    def part_dtype(self, dtype: str) -> str:
        """``dtype``: of the cache."""
        return dtype

    def part_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of the layer's part of a block."""
        return math.prod(self.shape(block_size)) * DTYPE_BYTES[self.part_dtype(dtype)]


class StateSpec(msgspec.Struct, frozen=True, tag=True):
    """What one recurrent layer keeps on one rank: a state of fixed size, which each token changes.

    A block is the state of a request at one position: the one that it changes in place, or a snapshot.
    """

    state_shape: tuple[int, ...]
    """In float32 words."""
    parts: tuple[tuple[int, ...], ...] = ()
    """The shapes of matrices and a convolution's inputs, which lie in it."""
    dtypes: tuple[str, ...] = ()
    """The dtypes of both."""
    state_dtype: ClassVar[str] = "float32"
    window: ClassVar[None] = None

    def shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of the layer's part of a block, which is one state."""
        return self.state_shape

    def part_dtype(self, dtype: str) -> str:
        """The state's own."""
        return self.state_dtype

    def part_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of a state, rounded up to `ALIGNMENT`."""
        return _align(math.prod(self.state_shape) * DTYPE_BYTES[self.state_dtype], ALIGNMENT)


LayerCacheSpec = KVCacheSpec | StateSpec

ALIGNMENT = 16
"""Bytes: what the parts of a block in an arena begin at multiples of, and the distances of blocks, with several groups.
The width of a load, and what a tensor map needs."""
MOST_WASTE = 0.04
"""The largest part of a slab that is left over by the blocks of a group."""
_CONVERSIONS = {"float32": "float", "bfloat16": "bfloat16", "float16": "half"}
"""The methods of a tensor that convert it."""
_MOST_BLOCKS = 64
"""Blocks in a slab of the group with the largest ones, at most."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with the same lifetime of what they keep. A request has a list of blocks in each group."""

    window: int | None = None
    """Positions that its layers read, the current one included; blocks before them are freed. None: all."""
    is_state: bool = False
    """Whether a block is a state, after the last computed token of ``block_size``, instead of K and V of these."""
    num_slots: int = 1
    """States of a running request: one for each token of a decode, the drafts included."""
    blocks_per_slab: int = 1
    """The same on all ranks."""
    has_layers: bool = True
    """False: only the ids of its blocks are used, for the ids of tokens."""

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that a query at ``position`` reads: of a state, that of the token before it."""
        window = 2 if self.is_state else self.window
        return 0 if window is None else max(0, position + 1 - window) // block_size

    def usable(self, count: int, block_size: int, has: Callable[[int], bool], begin: int = 0) -> int:
        """The most of ``count`` blocks of a prefix after which there is what a query reads: ``has`` of each block from
        ``begin`` on; those before are there."""
        block = count - 1
        while block >= max(begin, self.first_block(count * block_size, block_size)):
            if not has(block):
                count = block
            block -= 1
        return count

    def most_blocks(self, num_tokens: int, num_queries: int, block_size: int) -> int:
        """Blocks of a request of ``num_tokens`` tokens, ``num_queries`` of which are computed at once, at most."""
        if self.is_state:
            return self.num_slots
        if self.window is not None:
            num_tokens = min(num_tokens, self.window - 1 + num_queries + block_size - 1)
        return -(-num_tokens // block_size)


def num_tables(groups: Sequence[KVGroup]) -> int:
    """Tables of a request: one of each group, and of states one for each slot. Those of states are the last."""
    return sum(group.num_slots for group in groups)


ONE_GROUP = (KVGroup(),)
"""All layers keep all tokens."""


def usable_by_all(
    groups: Sequence[KVGroup], count: int, block_size: int, has: Callable[[int, int], bool], begin: int = 0
) -> int:
    """`KVGroup.usable` of every group: ``has(group, block)``. The first group has all ``count`` blocks."""
    before = -1
    while count != before and len(groups) > 1:
        before = count
        for index, group in enumerate(groups[1:], start=1):
            count = group.usable(count, block_size, partial(has, index), begin)
    return count


def slab_of(groups: Sequence[KVGroup], group: int, block_id: int) -> int:
    """The slab of a block; with one group, the block."""
    return block_id // groups[group].blocks_per_slab if len(groups) > 1 else block_id


class BlockPart(NamedTuple):
    """The contiguous part of each block of a group in one tensor. The first block begins with the tensor."""

    tensor: int
    """The index of the tensor."""
    num_bytes: int
    stride: int
    """Bytes between blocks."""


def group_of(spec: LayerCacheSpec, groups: Sequence[KVGroup]) -> int:
    """The index of a layer's group. The first group takes layers with a window that has none."""
    is_state = isinstance(spec, StateSpec)
    keys = [(group.window, group.is_state) for group in groups]
    return keys.index((spec.window, is_state)) if (spec.window, is_state) in keys else 0


def make_groups(
    specs: Sequence[LayerCacheSpec],
    others: Sequence[LayerCacheSpec],
    block_size: int,
    dtype: str,
    max_model_len: int,
    num_slots: int = 1,
) -> tuple[KVGroup, ...]:
    """The groups of the layers of a whole model; the first one frees no blocks while a request runs, and the one with
    states is the last.

    ``specs``: of the model; ``others``: of a drafter, which join the first group; ``num_slots``: of the states of a
    running request. A window that no request exceeds is none. The blocks of a slab are the fewest with which no group
    leaves more than `MOST_WASTE` of it.
    """
    windows = {spec.window for spec in specs if spec.window is not None and spec.window < max_model_len}
    groups = [KVGroup(), *map(KVGroup, sorted(windows))]
    if any(isinstance(spec, StateSpec) for spec in specs):
        groups.append(KVGroup(is_state=True, num_slots=num_slots))
    sizes = [0] * len(groups)
    for spec in specs:
        sizes[group_of(spec, groups)] += spec.part_bytes(block_size, dtype)
    sizes[0] += sum(spec.part_bytes(block_size, dtype) for spec in others)
    if len(groups) == 1:
        return ONE_GROUP
    counts = _blocks_per_slab([size for size in sizes if size])
    if not sizes[0]:  # as many ids as requests with blocks in the other groups may need
        most = max(1, min(group.most_blocks(max_model_len, 1, block_size) for group in groups[1:]))
        counts = [-(-max_model_len // (block_size * most)) * max(counts), *counts]
        groups[0] = replace(groups[0], has_layers=False)
    return tuple(replace(group, blocks_per_slab=n) for group, n in zip(groups, counts, strict=True))


def slabs_of(groups: Sequence[KVGroup], block_size: int, num_tokens: int, num_queries: int) -> int:
    """Slabs, or blocks of one group, that a request alone needs: see `KVGroup.most_blocks`."""
    counts = [-(-group.most_blocks(num_tokens, num_queries, block_size) // group.blocks_per_slab) for group in groups]
    return sum(counts) if groups[0].has_layers else max(counts[0], sum(counts[1:]))


def most_tokens(groups: Sequence[KVGroup], block_size: int, num_blocks: int, num_queries: int) -> int:
    """Tokens of the longest request that `slabs_of` finds room for in ``num_blocks``."""
    longest = num_blocks * groups[0].blocks_per_slab
    if len(groups) > 1:
        fits = range(longest + 1)
        longest = bisect_right(
            fits, num_blocks, key=lambda n: slabs_of(groups, block_size, n * block_size, num_queries)
        )
        longest -= 1
    return longest * block_size


def _blocks_per_slab(sizes: Sequence[int]) -> list[int]:
    """How many blocks of each of these sizes, in bytes, make a slab."""
    best: tuple[float, list[int]] = (1.0, [])
    for number in range(1, _MOST_BLOCKS + 1):
        counts = [number * max(sizes) // size for size in sizes]
        slab = _slab_bytes(sizes, counts)
        waste = max(1 - size * count / slab for size, count in zip(sizes, counts, strict=True))
        if waste <= MOST_WASTE:
            return counts
        best = min(best, (waste, counts))
    return best[1]


def _slab_bytes(sizes: Sequence[int], counts: Sequence[int]) -> int:
    """Bytes of the smallest slab in which ``counts[i]`` blocks of ``sizes[i]`` bytes are equally far apart."""
    largest = max(size * count for size, count in zip(sizes, counts, strict=True))
    return _align(largest, math.lcm(*counts) * ALIGNMENT)


def _align(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def kv_cache_specs(
    model: ModelConfig, dtype: str, *, tensor_parallel_size: int = 1, layers: range | None = None
) -> tuple[LayerCacheSpec, ...]:
    """A spec for each layer of the whole ``model``, or of ``layers`` of this rank of a pipeline, on one rank.
    ``dtype``: of the model, and of the inputs that states keep."""
    numbers, ranks = range(model.num_layers) if layers is None else layers, tensor_parallel_size
    specs: list[LayerCacheSpec] = []
    for layer in map(model.layers.__getitem__, numbers):
        if layer.recurrent is not None:
            shapes, dtypes = layer.recurrent.states(ranks), (model.state_dtype, dtype)
            num_words = sum(shapes.num_words(*map(DTYPE_BYTES.__getitem__, dtypes)))
            specs.append(StateSpec((num_words,), tuple(shapes), dtypes))
        else:
            specs.append(KVCacheSpec(num_kv_heads(layer.mixer, ranks), layer.mixer.head_dim, layer.mixer.window))
    return tuple(specs)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The tensors of a rank's KV cache, by ``LAYOUT_DIMENSIONS[name]``; of ``key_and_value``, index 0 is K, 1 is V. A
    block id means the same block in every layer of a group.

    An arena is divided into slabs of equal size, each of which belongs to one group at a time. With one group a slab is
    a block. With several, slab 0 is zeros, and never used: block 0 of every group lies in it.
    """

    num_blocks: int
    """Blocks that can be used; with several groups, slabs."""
    block_size: int
    dtype: str
    layers: tuple[LayerCacheSpec, ...]
    """The model's layers on this rank first, then a drafter's."""
    name: str = ARENA
    groups: tuple[KVGroup, ...] = ONE_GROUP
    num_others: int = 0
    """Layers at the end that are a drafter's: the first group has them."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: str,
        *,
        tensor_parallel_size: int = 1,
        layers: range | None = None,
        name: str = ARENA,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
        kv_dtype: str | None = None,
    ) -> KVLayout:
        """The layout of a model on one rank; ``dtype``, ``layers`` as in `kv_cache_specs`; ``kv_dtype``: of K and V, by
        default ``dtype``."""
        specs = kv_cache_specs(model, dtype, tensor_parallel_size=tensor_parallel_size, layers=layers)
        return cls(num_blocks, block_size, kv_dtype or dtype, specs, name, groups)

    def with_layers(self, layers: tuple[LayerCacheSpec, ...]) -> KVLayout:
        """This layout with the layers of a drafter after the present ones."""
        return replace(self, layers=(*self.layers, *layers), num_others=len(layers))

    @property
    def group_of_layers(self) -> list[int]:
        """The index of the group of each layer."""
        num_own = len(self.layers) - self.num_others
        return [group_of(spec, self.groups) for spec in self.layers[:num_own]] + [0] * self.num_others

    @property
    def num_slabs(self) -> int:
        """Slabs in memory."""
        return self.num_blocks + (len(self.groups) > 1)

    @property
    def tensor_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the contiguous tensors that hold the cache: of an arena ``[num_slabs, elements of a slab]``,
        else one for each layer."""
        if self.name == ARENA:
            return [(self.num_slabs, self.bytes_per_block // DTYPE_BYTES[self.dtype])]
        return [tuple(map(self._sizes(spec).__getitem__, LAYOUT_DIMENSIONS[self.name])) for spec in self.layers]

    @property
    def dimension_sizes(self) -> list[int]:
        """Sizes of the first layer with K and V by ``LAYOUT_DIMENSIONS[name]``, for messages; 0: there is none."""
        first = next((spec for spec in self.layers if isinstance(spec, KVCacheSpec)), self.layers[0])
        return [self._sizes(first).get(dimension, 0) for dimension in LAYOUT_DIMENSIONS[self.name]]

    def group_views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The blocks of each group in an arena, ``[num_blocks of the group, elements of a block]``, equally far
        apart; without elements for a group without layers on this rank."""
        flat, element, views = tensors[0].view(-1), DTYPE_BYTES[self.dtype], []
        for group, size in zip(self.groups, self.group_bytes, strict=True):
            count, stride = self.num_slabs * group.blocks_per_slab, self.bytes_per_block // group.blocks_per_slab
            views.append(flat.as_strided((count if size else 0, size // element), (stride // element, 1)))
        return views

    def layer_views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What each layer keeps: K and V as attention reads them, ``[num_blocks, 2, num_kv_heads, block_size,
        head_dim]``, or states ``[num_blocks, *state_shape]``, with the strides of the layout. ``tensors``: with
        `tensor_shapes`."""
        if self.name != ARENA:
            order = [LAYOUT_DIMENSIONS[self.name].index(name) for name in LAYOUT_DIMENSIONS[BLOCK_CONTIGUOUS_HND]]
            return [tensor.permute(order) for tensor in tensors]
        blocks, begins, views = self.group_views(tensors), [0] * len(self.groups), []
        for spec, group in zip(self.layers, self.group_of_layers, strict=True):
            begin, shape, dtype = begins[group], spec.shape(self.block_size), spec.part_dtype(self.dtype)
            begins[group] += spec.part_bytes(self.block_size, self.dtype) // DTYPE_BYTES[self.dtype]
            part = blocks[group][:, begin : begins[group]]
            if dtype != self.dtype:
                part = part.view(getattr(tensors[0][:0], _CONVERSIONS[dtype])().dtype)
            views.append(part[:, : math.prod(shape)].unflatten(1, shape))
        return views

    @property
    def block_parts(self) -> list[list[BlockPart]]:
        """What a block of each group consists of, in layouts in which blocks come first: of an arena one part, and none
        of a group without layers on this rank; else one for each layer."""
        if self.name == ARENA:
            strides = [self.bytes_per_block // group.blocks_per_slab for group in self.groups]
            parts = zip(self.group_bytes, strides, strict=True)
            return [[BlockPart(0, size, stride)] if size else [] for size, stride in parts]
        sizes = [spec.part_bytes(self.block_size, self.dtype) for spec in self.layers]
        return [[BlockPart(index, size, size) for index, size in enumerate(sizes)]]

    @property
    def group_bytes(self) -> list[int]:
        """Bytes of a block of each group, over all of its layers on this rank."""
        sizes = [0] * len(self.groups)
        for spec, group in zip(self.layers, self.group_of_layers, strict=True):
            sizes[group] += spec.part_bytes(self.block_size, self.dtype)
        return sizes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers; with several groups, of a slab."""
        sizes = self.group_bytes
        if len(sizes) == 1:
            return sizes[0]
        counts = [group.blocks_per_slab for group in self.groups if group.has_layers]
        return _slab_bytes([size for size, group in zip(sizes, self.groups, strict=True) if group.has_layers], counts)

    @property
    def first_blocks(self) -> list[int]:
        """The first block of each group that can be used; of states once for each slot."""
        has_slabs = len(self.groups) > 1
        return [group.blocks_per_slab * has_slabs for group in self.groups for _ in range(group.num_slots)]

    @property
    def num_token_blocks(self) -> int:
        """Ids of blocks of the first group, from 0 on: token ids are indexed by them."""
        return self.num_slabs * self.groups[0].blocks_per_slab

    @property
    def num_bytes(self) -> int:
        return self.num_slabs * self.bytes_per_block

    @property
    def fingerprint(self) -> str:
        """16 hex digits. Blocks can be copied between caches with equal fingerprints; ``num_blocks`` may differ."""
        layers = [repr(spec) for spec in self.layers]
        groups = [(group.window, group.is_state, group.has_layers and group.blocks_per_slab) for group in self.groups]
        text = repr((self.name, self.block_size, self.dtype, layers, groups))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _sizes(self, spec: LayerCacheSpec) -> dict[str, int]:
        sizes = {"num_blocks": self.num_slabs, "num_layers": len(self.layers)}
        if isinstance(spec, StateSpec):
            return sizes
        return sizes | dict(zip(_PART, spec.shape(self.block_size), strict=True))
