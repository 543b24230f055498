"""Torch without memory: metadata of results, no reads and writes, and errors of operations that need values."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fleetfoot.distributed.groups import _all_gather
from fleetfoot.kernels.runtime.dry_tensors import DryPassError, DryTensor, dry_torch, real_memory

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    # x is [4, 6] float32, index is [3] int64
    "slice": lambda x, index: x[1:3, 2:],
    "view of another dtype": lambda x, index: x.view(torch.int32)[1],
    "transpose": lambda x, index: x.t(),
    "unpacked": lambda x, index: tuple(x),
    "expand": lambda x, index: x[:, None].expand(4, 5, 6),
    "flatten": lambda x, index: x.t().flatten(),
    "contiguous": lambda x, index: x.t().contiguous(),
    "already contiguous": lambda x, index: x.contiguous(),
    "to": lambda x, index: x.to(torch.bfloat16),
    "to the same": lambda x, index: x.to(torch.float32),
    "clone": lambda x, index: x.t().clone(),
    "empty_like": lambda x, index: torch.empty_like(x[:, :3]),
    "new_empty": lambda x, index: index.new_empty((2, 3)),
    "factories": lambda x, index: (torch.zeros(3), torch.arange(2, 9), torch.full((2,), 7)),
    "range": lambda x, index: (*map(torch.arange, (5, 2.0)), torch.arange(3, dtype=torch.int32), torch.arange(0, 9, 2)),
    "like": lambda x, index: (torch.zeros_like(x.t()), torch.full_like(x[:, ::2], 3)),
    "like, of another dtype": lambda x, index: torch.ones_like(index, dtype=torch.int32),
    "like, contiguous": lambda x, index: torch.empty_like(x.t(), memory_format=torch.contiguous_format),
    "tensor": lambda x, index: torch.tensor([1, 2]) + index[:2],
    "sum with a number": lambda x, index: index + 1,
    "sum with a float": lambda x, index: index + 1.5,
    "sum of types": lambda x, index: x[0, :3] + index,
    "sum with one element": lambda x, index: index.to(torch.int32) + index.sum(),
    "broadcast": lambda x, index: x[:, :1] * x[:1],
    "transposed sum": lambda x, index: x.t() + 1,
    "sum of permuted": lambda x, index: x.view(2, 2, 6).permute(2, 0, 1) * 2,
    "sum of parts": lambda x, index: x[:, ::2].t() + 1,
    "compare": lambda x, index: (x > 0) & (x.t().t() < 3),
    "where": lambda x, index: torch.where(x > 0, x, 0.0),
    "where of integers": lambda x, index: torch.where(index < 1, 5, index.to(torch.int32)),
    "clamp": lambda x, index: index.clamp(min=0, max=2),
    "floor": lambda x, index: (index // 2, index % 2, x // 2.0),
    "divide": lambda x, index: index / 2,
    "square root": lambda x, index: torch.rsqrt(index),
    "maximum": lambda x, index: torch.maximum(index, index.flip(0)),
    "masked_fill": lambda x, index: x.masked_fill(x > 0, 1.0),
    "roll": lambda x, index: torch.roll(index, -1),
    "cumsum": lambda x, index: index.to(torch.int32).cumsum(0),
    "cat": lambda x, index: torch.cat((x, x[:, :2]), 1),
    "cat of types": lambda x, index: torch.cat((index, index.to(torch.int32))),
    "cat with nothing": lambda x, index: torch.cat((torch.zeros(0), x), -1),
    "stack": lambda x, index: torch.stack((index, index), 1),
    "stack behind": lambda x, index: torch.stack((x, x, x), dim=-1),
    "matrix products": lambda x, index: (x @ x.t(), torch.addmm(x[0, :2], x, x[:2].t()), x @ x[0]),
    "linear": lambda x, index: F.linear(x, x[:2]),
    "linear with a bias": lambda x, index: F.linear(x, x[:2], x[0, :2]),
    "embedding": lambda x, index: F.embedding(index, x),
    "index": lambda x, index: x[index],
    "an index of columns": lambda x, index: x[:, index],
    "indices of a matrix": lambda x, index: x[index.expand(2, 3)],
    "two indices": lambda x, index: x[index, index],
    "index_select": lambda x, index: x.index_select(0, index),
    "gather": lambda x, index: x[:3].gather(1, index.unsqueeze(1)).squeeze(1),
    "index_copy": lambda x, index: index.index_copy(0, index, index),
    "sum": lambda x, index: (x.sum(0), x.sum(dim=1, keepdim=True), index.to(torch.int32).sum()),
    "max": lambda x, index: (*x.max(1), x.argmax(1)),
    "topk": lambda x, index: tuple(x.topk(2)),
    "into": lambda x, index: torch.mul(x, 2, out=torch.empty(4, 6)),
}
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_": lambda x, index: x.add_(1),
    "fill_": lambda x, index: x.t().fill_(3),
    "a slice": lambda x, index: x[1:].__setitem__((slice(None), 0), 5.0),
    "a row": lambda x, index: x.__setitem__(0, x[1]),
    "indexed": lambda x, index: x.__setitem__(index, 2.0),
    "copy_": lambda x, index: x.copy_(torch.zeros(4, 6)),
    "index_copy_": lambda x, index: x.index_copy_(0, index, x[:3]),
    "addmm_": lambda x, index: x.addmm_(x[:, :4], x),
    "clamp_": lambda x, index: index.clamp_(min=2),
    "into": lambda x, index: torch.mul(x, 2, out=x),
}
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0, 0].item(),
    "a condition": lambda x: bool(x.sum() > 0),
    "int": lambda x: int(x.sum()),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[0].to(torch.int64)),
    "tolist": lambda x: (x + 1).tolist(),
    "numpy": lambda x: x.cpu().clone().numpy(),
    "unique": lambda x: x.unique(),
    "a shape in place": lambda x: (x + 1).t_(),
}


@pytest.fixture(params=[True, False], ids=["inference", "training"], autouse=True)
def _mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.inference_mode(request.param):
        yield


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    """Views into larger tensors, one of which is not aligned."""
    with torch.inference_mode(False):  # as weights and buffers are
        storage = torch.arange(64, dtype=torch.float32)
        return storage[3:27].view(4, 6), torch.tensor([9, 1, 0, 2])[1:]


def looks(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [looks(item) for item in value]
    address = value.data_ptr() % 16
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, address


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_have_the_metadata_of_real_ones(name: str) -> None:
    expected = looks(OPERATIONS[name](*arguments()))
    with dry_torch():
        assert looks(OPERATIONS[name](*arguments())) == expected
        of_dry = [torch.empty(64)[3:27].view(4, 6), torch.empty(4, dtype=torch.int64)[1:]]
        assert all(isinstance(tensor, DryTensor) for tensor in of_dry)
        assert looks(OPERATIONS[name](*of_dry)) == expected


@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_written(name: str) -> None:
    tensors = arguments()
    before = [tensor.clone() for tensor in tensors]
    with dry_torch():
        written = WRITES[name](*tensors)
    assert written is None or not isinstance(written, DryTensor) or name == "fill_"  # of which it wrote a view
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


@pytest.mark.parametrize("name", READS)
def test_operations_that_need_values_raise(name: str) -> None:
    x, _ = arguments()
    with dry_torch(), pytest.raises(DryPassError):
        READS[name](x)


def test_an_index_that_is_out_of_range_is_not_read() -> None:
    x, index = arguments()
    index.fill_(2**40)
    with dry_torch():
        assert x[index].shape == x.index_select(0, index).shape == F.embedding(index, x).shape == (3, 6)


def test_an_error_names_the_operation() -> None:
    x, _ = arguments()
    for operation, use in (("_local_scalar_dense", x[0, 0].item), ("add", lambda: x + x[:3])):  # shapes do not match
        with dry_torch(), pytest.raises(DryPassError, match=rf"aten\.{operation}"):
            use()


def test_a_tensor_is_invalid_after_its_dry_pass() -> None:
    x, _ = arguments()
    with dry_torch():
        kept = x + 1
    for use in (kept.data_ptr, lambda: kept + 1, lambda: x.copy_(kept), kept.numpy, kept.tolist):
        with pytest.raises(DryPassError):
            use()


def test_buffers_that_outlive_the_pass_have_memory() -> None:
    x, _ = arguments()
    with dry_torch():
        with real_memory():
            kept = torch.full((3,), 7)
        assert isinstance(kept + 1, DryTensor)
        assert isinstance(x[0], DryTensor)
    assert kept.tolist() == [7, 7, 7]


def test_torch_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), dry_torch():
        raise KeyError
    assert torch.ones(2).tolist() == torch.tensor([1.0, 1.0]).tolist()


def test_nothing_is_sent() -> None:
    """Also not a reduction that the backend does not support, or collectives that need more ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, _ = arguments()
        x = x.contiguous()
        with pytest.raises(RuntimeError):
            _all_gather(torch.empty(20, 6), x)
        with dry_torch():
            dist.all_reduce(x, op=dist.ReduceOp.BXOR)
            _all_gather(torch.empty(20, 6), x)
            dist.all_gather([torch.empty(4, 6)] * 3, x)
            handle = dist.all_reduce(x + 1, async_op=True)
            assert handle is not None and handle.wait()
    finally:
        dist.destroy_process_group()
