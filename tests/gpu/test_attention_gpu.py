"""The attention kernels, compiled: against the torch backend, in graphs, and with addresses past 32 bits."""

import threading
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.attention_batches import Batch, Requests, check_batch, make_batch, make_fused_batch, relative_error
from tests.helpers.kernels import triton_kernels

from fleetfoot.kernels.attention import max_rows
from fleetfoot.kernels.attention import triton_backend as triton_module
from fleetfoot.kernels.attention.prefill import paged_attention_prefill
from fleetfoot.kernels.attention.triton_backend import TritonBackend
from fleetfoot.kernels_hopper.attention import backend as hopper_module
from fleetfoot.kernels_hopper.attention import decode_hopper
from fleetfoot.runner.v2.input_batch import split_decodes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BOUND = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
DECODES: Requests = [(1, 100), (1, 1), (1, 0), (1, 5000), (1, 16), (1, 17), (1, 1024), (1, 0)]
DRAFTS: Requests = [(3, 100), (3, 3), (2, 900), (1, 0), (3, 4097)]
SHORT: Requests = [(1, 5), (1, 2049), (1, 64), (5, 77), (300, 300)]
MIXED: Requests = [*SHORT, (130, 1030), (7, 7), (128, 128), (1, 40), (333, 4000)]
FP8 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS = [(8, 8), (8, 4), (12, 4), (32, 8), (14, 2), (16, 2), (16, 1)]


@pytest.fixture(autouse=True)
def heads_of_96_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for few requests, where the plain kernel is faster."""
    monkeypatch.setattr(decode_hopper, "MIN_REQUESTS_OF_96", 1)


def attention() -> TritonBackend:
    """What an engine has on this GPU."""
    backend = triton_kernels().attention
    assert isinstance(backend, TritonBackend)
    return type(backend)()


def check(batch: Batch, window: int | None = None, backend: TritonBackend | None = None) -> None:
    backend = backend or attention()
    for _ in range(2):  # a launch leaves the workspace as it was
        # The output is memory that is allocated again, with what was in it: poison.
        poison = torch.full_like(batch.query, float("nan"))
        del poison
        check_batch(batch.attend(backend, window), batch, BOUND, window)


def cuda_batch(requests: Requests, heads: tuple[int, int] = (8, 2), **shape: Any) -> Batch:
    """The reference accepts padding requests among the decodes alone."""
    if any(query_len != 1 for query_len, _ in requests):
        requests = [request if request[1] else (0, 0) for request in requests]
    shape = {"head_dim": 128, "dtype": torch.bfloat16} | shape
    return make_batch(requests, num_heads=heads[0], num_kv_heads=heads[1], device="cuda", **shape)


SHAPES: list[dict[str, Any]] = [
    *({"heads": heads, "head_dim": size, "behind": 3} for heads, size in product(HEADS, (64, 96, 128))),
    *({"dtype": dtype, "head_dim": size} for dtype, size in product((torch.float16, torch.float32), (64, 96, 128))),
    *({"head_dim": head_dim} for head_dim in (16, 80, 256)),
    *({"head_dim": size, "soft_cap": cap, "window": w} for size, cap, w in ((256, 50.0, None), (128, 0.5, 100))),
    *({"block_size": size, "window": w} for size, w in product((16, 32, 64, 128, 256), (None, 1, 100, 1000))),
    *({"heads": heads, "window": w} for heads, w in product([(12, 4), (16, 8), (14, 2)], (1, 100, 1000))),
    *({"heads": heads, "block_size": size} for heads, size in product([(12, 4), (16, 8)], (8, 256))),
    {"head_dim": 64, "block_size": 8, "window": 300},
    *({"head_dim": 96, "block_size": size, "window": w} for size, w in ((16, 100), (32, None), (256, 1))),
    *({"head_dim": size, "kv_dtype": kv, "heads": heads} for size, kv, heads in product((64, 128), FP8, HEADS[2:5])),
    *({"head_dim": size, "kv_dtype": FP8[0], "window": 100, "soft_cap": 20.0} for size in (16, 80, 96, 256)),
    *({"dtype": dtype, "kv_dtype": kv} for dtype, kv in product((torch.float16, torch.float32), FP8)),
]


@pytest.mark.parametrize("requests", [DECODES, DRAFTS, MIXED], ids=["decodes", "drafts", "mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(requests: Requests, shape: dict[str, Any]) -> None:
    window = shape.get("window")
    check(cuda_batch(requests, **{name: value for name, value in shape.items() if name != "window"}), window)


@pytest.mark.parametrize("window", [None, 700])
def test_plain_prefill_kernel_where_hopper_has_its_own(window: int | None) -> None:
    for head_dim in (64, 128):
        check(cuda_batch(MIXED, (32, 8), head_dim=head_dim, behind=70), window, TritonBackend())


@pytest.mark.parametrize("heads", [(8, 4), (32, 8), (14, 2)])
@pytest.mark.parametrize("window", [None, 700])
def test_long_chunks_of_small_heads(heads: tuple[int, int], window: int | None) -> None:
    check(cuda_batch([(1, 90), (2100, 2100), (70, 3000), (2049, 5000)], heads, head_dim=64, behind=5), window)


@pytest.mark.parametrize("requests", [DECODES, DRAFTS, [(1, 1 + 37 * row % 700) for row in range(300)]])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_plain_decode_kernel_where_hopper_has_its_own(requests: Requests, head_dim: int) -> None:
    check(cuda_batch(requests, (32, 8), head_dim=head_dim), None, TritonBackend())


def test_pieces_of_one_long_request_among_short_ones() -> None:
    for heads in ((8, 8), (32, 8), (32, 2)):
        check(cuda_batch([(1, 30000), *((1, 1 + 13 * row % 90) for row in range(60)), (1, 0), (1, 9000)], heads))


@pytest.mark.parametrize("num_reqs", [1, 16, 17, 256, 300])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_many_requests(num_reqs: int, head_dim: int) -> None:
    check(cuda_batch([(1, 1 + 37 * row % 700) for row in range(num_reqs)], head_dim=head_dim))
    mixed = [(1 + 29 * row % 50, 50 + 37 * row % 300) for row in range(num_reqs)]
    check(cuda_batch(mixed, num_decodes=0, head_dim=head_dim))


@pytest.mark.parametrize("num_padding", [1, 127, 128, 300])
@pytest.mark.parametrize("heads", [(8, 4), (12, 4)])
def test_prompts_in_a_batch_that_is_mostly_padding(num_padding: int, heads: tuple[int, int]) -> None:
    padding = [(0, 0)] * num_padding
    for requests in ([(1, 700), (200, 200), (1, 1)], [(1, 30), (129, 400)], [(64, 64)] * 130):
        check(cuda_batch([*requests, *padding], heads, behind=170))


@pytest.mark.parametrize("heads", [(8, 4), (32, 8), (12, 4)])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_decodes_split_off_on_the_device(heads: tuple[int, int], head_dim: int) -> None:
    padding = [(0, 0)] * 100
    for requests in ([(1, 9000), (1, 3), (200, 300)], [(64, 64), (1, 30)], [(1, 17000)], [(1, 40)] * 80):
        batch = cuda_batch([*requests, *padding], heads, head_dim=head_dim, behind=110, num_decodes=0)
        step: Any = SimpleNamespace(metadata=batch.metadata, metadata_of_layers=())
        split_decodes(step, torch.arange(300, dtype=torch.int32, device="cuda"))
        check(batch)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_every_length_of_a_last_block(head_dim: int) -> None:
    """Of 16 positions, of which a half may be copied."""
    for first in (1, 49, 113):
        check(cuda_batch([(1, first + row % 17) for row in range(80)], (8, 4), head_dim=head_dim))


def test_one_graph_for_all_lengths() -> None:
    """Of decodes, and of a mixed batch."""
    ones = [1] * 6
    decodes = [(ones, lengths) for lengths in ([4000] * 6, [1, 0, 3999, 64, 65, 0], [5, 2000, 0, 0, 0, 0])]
    mixed = [
        ([1, 1, 40, 30, 0], [600, 1, 40, 600, 0]),
        ([1, 1, 7, 2, 55], [6, 599, 300, 2, 300]),
        ([1, 1, 0, 0, 0], [1, 1, 0, 0, 0]),
    ]
    for batch, steps in (
        (cuda_batch([(1, 4000)] * 6, (32, 8)), decodes),
        (cuda_batch([(1, 600), (1, 600), (40, 600), (30, 600), (0, 600)], (32, 8), behind=10), mixed),
    ):
        backend = attention()
        batch.attend(backend)  # compiles, and allocates the workspace
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = batch.attend(backend)
        for query_lens, lengths in steps:
            batch.metadata.query_start_loc[1:].copy_(torch.tensor(query_lens).cumsum(0))
            batch.metadata.seq_lens.copy_(torch.tensor(lengths))
            actual.fill_(float("nan"))
            graph.replay()
            # Positions past a length are now a request's own, and finite; the reference reads the same.
            assert relative_error(actual, batch.expected()) < BOUND[torch.bfloat16]


def test_the_first_call_may_not_be_captured() -> None:
    backend, batch = attention(), cuda_batch([(1, 40)])
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="run a step of this shape once before capturing it"),
        torch.cuda.graph(graph),
    ):
        batch.query.add_(1)  # an empty graph would be a warning
        batch.attend(backend)


def test_one_compilation_serves_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    backend = attention()

    def run(*requests: Requests) -> None:
        for each in requests:
            cuda_batch(each).attend(backend)

    run(
        [(1, 40)], [(1, 30)] * 17, [(1, 30)] * 65, [(100, 200)], [(1, 3), (16, 20)]
    )  # all numbers of requests up to 256
    compiled: list[Any] = []

    def note(**event: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # others compile for engines of earlier tests
            compiled.append(event["repr"] + str(event["key"]))

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    run([(1, 1)] * 16, [(1, 4000)] * 256, [(1, 40), (1000, 1000), (17, 16 + 17)], [(16, 16)] * 5, [(1, 1), (13, 14)])
    assert not compiled, "\n".join(compiled)


@pytest.mark.parametrize("requests", [[(1, 40)], [(8, 40)], [(40, 40)]])
def test_a_cache_past_32_bits(requests: Requests) -> None:
    batch = cuda_batch(requests, (32, 8))
    block_elements = batch.kv_cache[0].numel()
    num_blocks = 2**31 // block_elements + 64
    if torch.cuda.mem_get_info()[0] < 3 * num_blocks * block_elements:
        pytest.skip(f"needs {3 * num_blocks * block_elements / 2**30:.0f} GiB of GPU memory")
    expected = batch.expected()
    cache = torch.empty(num_blocks, *batch.kv_cache.shape[1:], dtype=torch.bfloat16, device="cuda")
    few = batch.kv_cache.shape[0]
    cache[-few:] = batch.kv_cache
    batch.kv_cache = cache
    used = -(-requests[0][1] // 16)
    batch.metadata.block_tables[:, :used] += num_blocks - few
    assert relative_error(batch.attend(attention()), expected) < BOUND[torch.bfloat16]


def test_plain_and_hopper_kernels_agree_on_a_long_prompt() -> None:
    batch = cuda_batch([(8192, 8192)], (16, 8))
    actual = batch.attend(attention())
    plain = torch.full_like(actual, float("nan"))
    paged_attention_prefill(batch.inputs(), out=plain)
    assert relative_error(actual, plain) < BOUND[torch.bfloat16]
    assert relative_error(actual, batch.expected()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("heads", [(16, 8), (12, 4), (16, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_of_other_requests_do_not_matter(heads: tuple[int, int], head_dim: int) -> None:
    """A tile of queries may extend into those of the next request, and past the last one's."""
    requests = [(70, 70), (130, 400), (1, 90), (200, 200), (65, 1000), (3, 3)]
    batch = cuda_batch(requests, heads, head_dim=head_dim, num_decodes=0, behind=5)
    starts = batch.metadata.query_start_loc.tolist()
    expected = batch.expected()
    for parity in (0, 1):
        kept = [slice(*starts[row : row + 2]) for row in range(parity, len(requests), 2)]
        poisoned = replace(batch, query=torch.full_like(batch.query, float("nan")))
        for rows in kept:
            poisoned.query[rows] = batch.query[rows]
        actual = poisoned.attend(attention())
        for rows in kept:
            assert relative_error(actual[rows], expected[rows]) < BOUND[torch.bfloat16]


MANY: Requests = [(1, 100), (1, 1), (1, 0), (1, 300), (1, 16), (1, 17), (1, 600), (1, 0)] * 40
FUSED_DRAFTS: Requests = [(3, 100), (3, 3), (3, 900), (3, 65), (3, 4097), (3, 34)]


@pytest.mark.parametrize("requests", [DECODES, FUSED_DRAFTS, MANY], ids=["decodes", "drafts", "many"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("has_norm", "kv_dtype"), [(False, None), (True, None), (True, FP8[0])])
def test_norm_rotation_and_cache_write_within_the_kernel(
    requests: Requests, heads: tuple[int, int], head_dim: int, has_norm: bool, kv_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for module in (triton_module, hopper_module):
        for limit in [name for name in vars(module) if "FUSED" in name and "QUERY" not in name]:
            monkeypatch.setattr(module, limit, 1000)  # also where two kernels would be faster
    num_heads, num_kv_heads = heads
    shape: dict[str, Any] = {"head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda", "kv_dtype": kv_dtype}
    shape |= {"norm_offset": 1.0, "soft_cap": 20.0} if has_norm and head_dim == 256 else {}
    batch = make_fused_batch(requests, num_heads=num_heads, num_kv_heads=num_kv_heads, has_norm=has_norm, **shape)
    if requests[0][0] * num_heads // num_kv_heads > max_rows(head_dim):
        pytest.skip("so many rows fit in registers with smaller heads only")
    arguments = (
        batch.qkv,
        batch.kv_cache,
        batch.metadata,
        num_heads,
        batch.rotary,
        head_dim**-0.5,
        None,
        batch.soft_cap,
    )
    backend = attention()
    actual = batch.check(lambda: backend.forward_fused(*arguments), BOUND[torch.bfloat16])

    batch.metadata.seq_lens[0] = 0  # a graph is replayed for other lengths
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.forward_fused(*arguments)
    batch.metadata.seq_lens[0] = requests[0][1]
    graph.replay()
    live = batch.metadata.slot_mapping >= 0
    assert captured is not None
    assert torch.equal(captured[live], actual[live])
