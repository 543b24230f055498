"""Blocks as rows of host memory: in torch, by the kernel in Triton's interpreter, and copies on a CPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.interpreter import interpreted

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, HostMemory, LayerRows, block_copies
from fleetfoot.records.kv_layout import BLOCK_CONTIGUOUS_HND, KVCacheSpec, KVLayout

LAYOUTS = {
    "plain": KVLayout(9, 4, "float32", (KVCacheSpec(2, 6),) * 2),
    "drafter": KVLayout(9, 4, "bfloat16", (*[KVCacheSpec(2, 300)] * 2, KVCacheSpec(1, 4))),
    "odd": KVLayout(9, 1, "float16", (KVCacheSpec(1, 3),) * 2),
}
LAYOUTS |= {
    f"{name}, a tensor for each layer": replace(each, name=BLOCK_CONTIGUOUS_HND) for name, each in LAYOUTS.items()
}


def random_caches(layout: KVLayout) -> list[torch.Tensor]:
    return [torch.randn(shape).to(getattr(torch, layout.dtype)) for shape in layout.tensor_shapes]


def row_of(caches: list[torch.Tensor], block: int) -> torch.Tensor:
    """The bytes of a block, by hand."""
    return torch.cat([cache[block].reshape(-1).view(torch.uint8) for cache in caches])


@pytest.mark.parametrize("use_triton", [False, pytest.param(True, marks=interpreted)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_blocks(name: str, use_triton: bool) -> None:
    layout = LAYOUTS[name]
    caches = random_caches(layout)
    before = [cache.clone() for cache in caches]
    table = LayerRows(caches, layout, use_triton=use_triton)
    rows = torch.zeros((3, table.num_words), dtype=table.word)
    table.gather(torch.tensor([7, 0, 5]), rows)
    for row, block in zip(rows, [7, 0, 5], strict=True):
        assert torch.equal(row.view(torch.uint8), row_of(before, block))
    table.scatter(rows, torch.tensor([1, 8, 7]))
    for cache, was in zip(caches, before, strict=True):
        expected = was.clone()
        expected[[1, 8, 7]] = was[[7, 0, 5]]
        assert torch.equal(cache, expected)


@settings(max_examples=50, deadline=None)
@given(
    blocks=st.permutations(range(9)), slots=st.permutations(range(12)), count=st.integers(1, 9),
    name=st.sampled_from(sorted(LAYOUTS)),
)  # fmt: skip
def test_blocks_go_out_and_come_back(blocks: list[int], slots: list[int], count: int, name: str) -> None:
    layout = LAYOUTS[name]
    caches = random_caches(layout)
    copies, host = block_copies(caches, layout), HostMemory(12, layout.bytes_per_block, pinned=False, asked_by="")
    assert type(copies) is BlockCopies
    out, places = blocks[:count], slots[:count]
    rows = {slot: row_of(caches, block) for block, slot in zip(out, places, strict=True)}
    assert copies.to_host(out, host.tensor, places).query()
    for slot, row in rows.items():
        assert torch.equal(host.tensor[slot], row)
        assert bytes(host.row(slot)) == row.numpy().tobytes()
    targets = blocks[-count:]
    copies.from_host(host.tensor, places, targets).synchronize()
    for slot, block in zip(places, targets, strict=True):
        assert torch.equal(row_of(caches, block), rows[slot])
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
        HostMemory(1 << 50, 1 << 10, pinned=False, asked_by="a_setting")
