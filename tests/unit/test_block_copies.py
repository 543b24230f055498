"""Blocks as rows of host memory: in torch, by the kernel in Triton's interpreter, and copies on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.interpreter import interpreted

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, HostMemory, LayerRows, block_copies
from fleetfoot.records.kv_layout import BLOCK_CONTIGUOUS_HND, KVCacheSpec, KVLayout, make_groups

LAYOUTS = {
    "plain": KVLayout(9, 4, "float32", (KVCacheSpec(2, 6),) * 2),
    "drafter": KVLayout(9, 4, "bfloat16", (*[KVCacheSpec(2, 300)] * 2, KVCacheSpec(1, 4))),
    "odd": KVLayout(9, 1, "float16", (KVCacheSpec(1, 3),) * 2),
}
WINDOWS = tuple(KVCacheSpec(2, 6, window) for window in (8, 8, None, 8, 5))
LAYOUTS |= {
    f"{name}, a tensor for each layer": replace(each, name=BLOCK_CONTIGUOUS_HND) for name, each in LAYOUTS.items()
}
LAYOUTS["groups"] = KVLayout(8, 4, "bfloat16", WINDOWS, groups=make_groups(WINDOWS, (), 4, "bfloat16", 100))


def random_caches(layout: KVLayout) -> list[torch.Tensor]:
    return [torch.randn(shape).to(getattr(torch, layout.dtype)) for shape in layout.tensor_shapes]


def row_of(caches: list[torch.Tensor], layout: KVLayout, group: int, block: int) -> torch.Tensor:
    """The bytes of a block, by hand."""
    views = zip(layout.layer_views(caches), layout.group_of_layers, strict=True)
    parts = [view[block].reshape(-1).contiguous().view(torch.uint8) for view, index in views if index == group]
    return torch.cat(parts)


@pytest.mark.parametrize("use_triton", [False, pytest.param(True, marks=interpreted)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_blocks(name: str, use_triton: bool) -> None:
    layout = LAYOUTS[name]
    for group in range(len(layout.groups)):
        caches = random_caches(layout)
        before = [cache.clone() for cache in caches]
        table = LayerRows(caches, layout.block_parts[group], use_triton=use_triton)
        rows = torch.zeros((3, table.num_words), dtype=table.word)
        table.gather(torch.tensor([7, 0, 5]), rows)
        for row, block in zip(rows, [7, 0, 5], strict=True):
            assert torch.equal(row.view(torch.uint8), row_of(before, layout, group, block))
        table.scatter(rows, torch.tensor([1, 8, 7]))
        expected = [cache.clone() for cache in before]
        was, views = layout.layer_views(before), layout.layer_views(expected)
        for layer, index in enumerate(layout.group_of_layers):
            if index == group:
                views[layer][[1, 8, 7]] = was[layer][[7, 0, 5]]
        assert all(torch.equal(*pair) for pair in zip(caches, expected, strict=True))


@settings(max_examples=50, deadline=None)
@given(
    blocks=st.permutations(range(9)), slots=st.permutations(range(12)), count=st.integers(1, 9),
    name=st.sampled_from(sorted(LAYOUTS)), data=st.data(),
)  # fmt: skip
def test_blocks_go_out_and_come_back(blocks: list[int], slots: list[int], count: int, name: str, data: Any) -> None:
    layout = LAYOUTS[name]
    group = data.draw(st.sampled_from(range(len(layout.groups))))
    caches = random_caches(layout)
    of_groups = zip(layout.groups, layout.group_bytes, strict=True)
    sizes = [(each.blocks_per_slab, size) for each, size in of_groups]
    copies, host = (
        block_copies(caches, layout),
        HostMemory(12, layout.bytes_per_block, sizes, pinned=False, asked_by=""),
    )
    assert type(copies) is BlockCopies
    out, places = blocks[:count], slots[:count]
    rows = {slot: row_of(caches, layout, group, block) for block, slot in zip(out, places, strict=True)}
    assert copies.to_host(group, out, host, places).query()
    for slot, row in rows.items():
        assert torch.equal(host.slots[group][slot], row)
        assert bytes(host.row(group, slot)) == row.numpy().tobytes()
    targets = blocks[-count:]
    copies.from_host(group, host, places, targets).synchronize()
    for slot, block in zip(places, targets, strict=True):
        assert torch.equal(row_of(caches, layout, group, block), rows[slot])
    copies.fence(targets)
    copies.close()
    host.close()


def test_caches_that_are_not_one_piece() -> None:
    layout = replace(LAYOUTS["plain"], name=BLOCK_CONTIGUOUS_HND)
    caches = [cache.transpose(2, 3) for cache in random_caches(layout)]
    with pytest.raises(ValueError, match=r"shape \(9, 2, 4, 2, 6\) is not contiguous"):
        block_copies(caches, layout)


def test_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"no memory on the host for 1,125,899,906,842,624 KV blocks .*; lower a_s"):
        HostMemory(1 << 50, 1 << 10, [], pinned=False, asked_by="a_setting")
