"""The Triton attention kernels, interpreted, against the torch backend, and compiled for a GPU that is not here."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.attention_batches import Batch, Requests, check_batch, make_batch, make_fused_batch, ragged
from tests.helpers.interpreter import compiled, interpreted, run_python

from fleetfoot.kernels.attention import MAX_ROWS, decode, max_rows, split_kv, triton_backend
from fleetfoot.kernels.attention.prefill import PrefillTiling, choose_prefill_tiling, paged_attention_prefill
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.attention.split_kv import AttentionWorkspace
from fleetfoot.kernels.attention.triton_backend import TritonBackend
from fleetfoot.kernels.runtime import gpu_limits, internals
from fleetfoot.kernels.runtime.row_padding import readable_rows
from fleetfoot.kernels_hopper.linear.product_tilings import attention_bytes
from fleetfoot.records.kv_layout import TOKEN_MAJOR_NHD, KVLayout
from fleetfoot.runner.v2.input_batch import split_decodes

BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DECODES: Requests = [(1, 50), (1, 1), (1, 0), (1, 130), (1, 16), (1, 17)]
CPU = torch.device("cpu")
TILING = decode.DecodeTiling(16, min_tiles=1, full_tiles=2, pair_tiles=1, programs_per_sm=2, num_warps=4, num_stages=3)
MIXED: Requests = [(1, 5), (1, 40), (3, 3), (33, 80), (1, 7), (17, 17)]


SPLITS: dict[str, Requests] = {
    "decodes": [(1, 30), (1, 1)],
    "one launch for all": [(1, 30), (1, 9), (6, 20)],
    "decodes, then short requests": [(1, 30), (1, 9), (20, 40), (3, 3)],
    "decodes, then prompts": [(1, 30), (1, 9), (40, 70), (33, 33)],
    "a prompt": [(40, 70)],
}


def check_decode(
    batch: Batch, window: int | None = None, *, num_programs: int = 5, pair_tiles: int = 1, times: int = 1
) -> None:
    tiling = replace(TILING, pair_tiles=pair_tiles)
    workspace = AttentionWorkspace(CPU, num_programs)
    for _ in range(times):
        out = torch.full(batch.query.shape, float("nan"), dtype=batch.query.dtype)
        decode.paged_attention_decode(batch.inputs(window), workspace=workspace, out=out, tiling=tiling)
        check_batch(out, batch, BOUND, window)


def check_prefill(batch: Batch, window: int | None = None) -> None:
    out = torch.full(batch.query.shape, float("nan"), dtype=batch.query.dtype)
    tiling = PrefillTiling(rows=32, tile=16, num_warps=4, num_stages=3)
    paged_attention_prefill(batch.inputs(window), out=out, tiling=tiling)
    check_batch(out, batch, BOUND, window)


@interpreted
@pytest.mark.parametrize(("num_programs", "pair_tiles"), [*product((1, 3, 40), (1,)), *product((2, 5, 7), (0, 2, 7))])
@pytest.mark.parametrize("window", [None, 20])
def test_decodes_cut_anywhere(num_programs: int, pair_tiles: int, window: int | None) -> None:
    """From one program for all pairs to more programs than tiles. The cost of a pair only moves the cuts, requests that
    pad the batch take no part, and a launch leaves the workspace as it was."""
    requests = [(1, 0), (1, 1), (1, 130), (0, 0), (1, 0), (1, 5), (1, 48), (1, 49), (1, 16), (1, 17), (1, 0)]
    check_decode(make_batch(requests, behind=3), window, num_programs=num_programs, pair_tiles=pair_tiles, times=2)


@interpreted
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 2), 64), ((3, 1), 80), ((7, 1), 80), ((9, 3), 96), ((16, 1), 128), ((8, 2), 8)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_shapes(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    check_decode(make_batch([(1, 70), (1, 3)], dtype=dtype, **shape))
    check_prefill(make_batch([(20, 50), (18, 18)], dtype=dtype, **shape))


@interpreted
@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None) -> None:
    """Once for each pair, whether or not programs share it."""
    for num_programs in (1, 7):
        check_decode(make_batch([(1, 130), (1, 0), (1, 5)], has_sinks=True), window, num_programs=num_programs)
    check_decode(make_batch([(3, 60), (3, 3)], num_heads=6, has_sinks=True), window)
    check_prefill(make_batch(MIXED, num_heads=6, has_sinks=True, behind=3), window)


@interpreted
@pytest.mark.parametrize("query_len", [2, 5])
@pytest.mark.parametrize("window", [None, 9])
def test_decodes_with_drafts(query_len: int, window: int | None) -> None:
    requests = [(query_len, 60), (query_len, query_len), (1, 3), (query_len, 33), (0, 0)]
    check_decode(make_batch(requests, num_heads=6, behind=query_len), window, num_programs=6)


@interpreted
@pytest.mark.parametrize(("block_size", "behind"), [(16, 0), (32, 1), (64, 50), (128, 0)])
def test_block_sizes_and_tokens_after_the_last_request(block_size: int, behind: int) -> None:
    check_decode(make_batch([(1, 60), (1, 129), (1, 64), (1, 0)], block_size=block_size, behind=behind))
    check_prefill(make_batch([(20, 70), (30, 30), (0, 0)], block_size=block_size, behind=behind))


@interpreted
@pytest.mark.parametrize("window", [None, 1, 11])
@pytest.mark.parametrize("num_heads", [2, 6])
def test_mixed_batch_by_prefill_kernel(window: int | None, num_heads: int) -> None:
    check_prefill(make_batch(MIXED, num_heads=num_heads, behind=3), window)


@interpreted
@given(requests=ragged(60, max_size=5), window=st.none() | st.integers(1, 70), data=st.data())
@settings(max_examples=5, deadline=None)
def test_ragged_batches(requests: Requests, window: int | None, data: st.DataObject) -> None:
    batch = make_batch(requests, block_size=16)
    check_prefill(batch, window)
    if batch.metadata.max_query_len * 2 <= MAX_ROWS:
        check_decode(batch, window, num_programs=data.draw(st.integers(1, 30), label="num_programs"))


@interpreted
@pytest.mark.parametrize("requests", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("window", [None, 12])
def test_backend_splits_the_batch(requests: Requests, window: int | None) -> None:
    batch = make_batch(requests, behind=2)
    check_batch(batch.attend(TritonBackend(), window), batch, BOUND, window)


ON_DEVICE: dict[str, Requests] = {
    **SPLITS,
    "a chunk of one token behind decodes": [(1, 70), (1, 9), (1, 1), (30, 40), (1, 50)],
    "prompts alone": [(20, 20), (5, 33)],
    "decodes alone": [(1, 70), (1, 9)],
}


@interpreted
@pytest.mark.parametrize("requests", ON_DEVICE.values(), ids=ON_DEVICE)
@pytest.mark.parametrize("window", [None, 12])
def test_decodes_are_split_off_on_the_device(requests: Requests, window: int | None) -> None:
    """In a graph of a mixed batch, which is padded to more requests and tokens."""
    batch = make_batch([*requests, (0, 0), (0, 0), (0, 0)], behind=7, num_decodes=0)
    metadata = batch.metadata
    split_decodes(SimpleNamespace(metadata=metadata, metadata_of_layers=()), torch.arange(40, dtype=torch.int32))  # type: ignore[arg-type]
    assert metadata.split is not None
    decodes, others = metadata.split
    num_decodes = next((i for i, (query_len, _) in enumerate(requests) if query_len != 1), len(requests))
    lens = [seq_len for _, seq_len in requests[:num_decodes]]
    assert decodes.seq_lens.tolist() == lens + [0] * (len(metadata.seq_lens) - num_decodes)
    assert others.query_start_loc.diff().tolist() == [
        *(0 for _ in lens),
        *(query_len for query_len, _ in requests[num_decodes:]),
        *(0, 0, 0),
    ]
    check_batch(batch.attend(TritonBackend(), window), batch, BOUND, window)


@interpreted
@pytest.mark.parametrize(("soft_cap", "dtype"), [(0.4, torch.float32), (5.0, torch.bfloat16)])
def test_soft_caps(soft_cap: float, dtype: torch.dtype) -> None:
    for window in (None, 12):
        check_decode(make_batch(DECODES, soft_cap=soft_cap, dtype=dtype), window)
        check_prefill(make_batch(MIXED, soft_cap=soft_cap, dtype=dtype), window)
    batch = make_batch(SPLITS["decodes, then prompts"], soft_cap=soft_cap, dtype=dtype)
    check_batch(batch.attend(TritonBackend()), batch, BOUND, None)


@interpreted
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kv_in_fp8(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Decodes, prompts, a batch of both, and decodes that write K and V."""
    for window in (None, 12):
        check_decode(make_batch(DECODES, dtype=dtype, kv_dtype=kv_dtype), window)
        check_prefill(make_batch(MIXED, dtype=dtype, kv_dtype=kv_dtype, has_sinks=True), window)
    batch = make_batch(SPLITS["decodes, then prompts"], dtype=dtype, kv_dtype=kv_dtype)
    check_batch(batch.attend(TritonBackend()), batch, BOUND, None)
    check_batch(batch.attend(SDPABackend()), batch, BOUND, None)
    for requests in ([(1, 20), (1, 0), (1, 33)], [(3, 20), (3, 3)]):
        fused = make_fused_batch(requests, dtype=dtype, kv_dtype=kv_dtype)
        weight = torch.empty(8, 8)
        fused.check(
            lambda fused=fused, w=weight: fused.decode(AttentionWorkspace(CPU, 3), None, TILING, w), BOUND[dtype]
        )


@interpreted
@pytest.mark.parametrize("head_dim", [64, 128])
def test_token_major_layout(head_dim: int) -> None:
    """The same bits as in blocks that are contiguous."""
    layout = KVLayout(1, 16, "float32", (), TOKEN_MAJOR_NHD)
    for requests in (MIXED, DECODES):
        batch = make_batch(requests, num_heads=6, num_kv_heads=3, head_dim=head_dim)
        expected = batch.attend(TritonBackend())
        (batch.kv_cache,) = layout.layer_views([batch.kv_cache.permute(1, 0, 3, 2, 4).contiguous()])
        assert torch.equal(batch.attend(TritonBackend()), expected)


@interpreted
@pytest.mark.parametrize("tensor", ["query", "kv_cache"])
def test_strided_tensors(tensor: str) -> None:
    """The query is a slice of the fused projection; the layers of a block may share its piece of memory."""
    batch = make_batch(MIXED)
    expected, whole = batch.attend(TritonBackend()), getattr(batch, tensor)
    strided = torch.stack((whole, torch.full_like(whole, float("nan"))), dim=1)[:, 0]
    setattr(batch, tensor, strided)
    assert torch.equal(batch.attend(TritonBackend()), expected)


def test_other_shapes_go_to_torch() -> None:
    batch = make_batch(MIXED, head_dim=12)
    assert torch.equal(batch.attend(TritonBackend()), batch.attend(SDPABackend()))


def test_supported_shapes() -> None:
    half, brain = torch.float16, torch.bfloat16
    for shape in ((128, 4, brain), (256, 32, half), (80, 1, torch.float32)):
        assert TritonBackend.supports(*shape)
    for shape in ((256, 33, half), (128, 71, brain), (100, 1, brain), (512, 1, brain), (128, 4, torch.float64)):
        assert not TritonBackend.supports(*shape)


def test_outputs_have_room_for_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product behind attention copies 64 rows at a time."""
    monkeypatch.setattr(triton_backend, "paged_attention_decode", lambda *arguments, **options: None)
    monkeypatch.setattr(triton_backend, "FUSED_PAIRS_PER_SM", 1000)
    batch = make_fused_batch([(1, 5)] * 20, num_kv_heads=2, head_dim=64)
    backend, inputs = TritonBackend(), (batch.kv_cache, batch.metadata)
    fused = backend.forward_fused(batch.qkv, *inputs, 4, batch.rotary, 0.125, None)
    outputs = fused, backend.forward(torch.empty(20, 4, 64), *inputs, 0.125, None)
    assert [each is not None and readable_rows(each.flatten(1), 64) for each in outputs] == [64, 64]


def test_tensors_that_do_not_fit_are_named() -> None:
    batch = make_batch([(1, 5)])
    backend = TritonBackend()
    with pytest.raises(ValueError, match=r"query \[1, 4, 16\] torch.float32 .* does not match the KV cache"):
        backend.forward(batch.query, batch.kv_cache.half(), batch.metadata, 0.25, None)
    shifted = torch.cat((torch.zeros(1), batch.query.flatten()))[1:].view(batch.query.shape)
    with pytest.raises(ValueError, match="not aligned to 16 bytes"):
        backend.forward(shifted, batch.kv_cache, batch.metadata, 0.25, None)
    with pytest.raises(ValueError, match="scale is 0"):
        backend.forward(batch.query, batch.kv_cache, batch.metadata, 0, None)


@pytest.mark.parametrize("shared_bytes", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 16, 64])
def test_tiles_fit_in_shared_memory(shared_bytes: int, element_size: int, head_dim: int, group: int) -> None:
    """Three stages of K and V beside Q, which is what the compiler may take for two that are in flight."""
    row_bytes = head_dim * element_size
    rows = min(max(16, group), max_rows(head_dim))
    prefill = choose_prefill_tiling(rows, head_dim, element_size, shared_bytes)
    assert prefill.rows >= rows
    chosen = decode.choose_decode_tiling(rows, head_dim, element_size, shared_bytes)
    for tile_rows, tiling in ((prefill.rows, prefill), (rows, chosen)):
        assert (tile_rows + 2 * tiling.num_stages * tiling.tile) * row_bytes <= shared_bytes
        assert tiling.tile >= 16


def test_a_workspace_does_not_grow_while_a_graph_is_captured() -> None:
    on_device = SimpleNamespace(is_cuda=True)
    with (
        patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(RuntimeError, match=r"grow to 64 elements.* run a step of this shape once before capturing it"),
    ):
        split_kv._zeros(64, on_device)  # type: ignore[arg-type]


def test_another_version_of_triton_gets_the_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = gpu_limits.GPULimits(num_sms=132, shared_bytes=227 * 1024, capability=(9, 0))
    monkeypatch.setattr(gpu_limits, "gpu_limits", lambda device: hopper)
    for version, is_supported in (("3.6.0", True), ("4.0.0", False)):
        monkeypatch.setattr(internals, "version", lambda package, version=version: version)
        monkeypatch.setattr(gpu_limits, "is_tested_triton", internals.is_tested_triton.__wrapped__)
        assert gpu_limits.has_hopper_kernels.__wrapped__(torch.device("cpu")) == is_supported


@compiled
def test_hopper_kernel_for_heads_of_96() -> None:
    """For few requests, the Triton kernel is faster."""
    from fleetfoot.kernels_hopper.attention import decode_hopper

    for head_dim, num_reqs, is_supported in ((128, 1, True), (96, 63, False), (96, 64, True), (80, 64, False)):
        batch = make_batch([(1, 20)] * num_reqs, head_dim=head_dim, dtype=torch.bfloat16)
        assert decode_hopper.supports(batch.inputs()) == is_supported


@compiled
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """No registers spill, or a few outside of loops."""
    output = run_python(
        "-m", "tests.helpers.compile_kernels", "attention", is_forked=True, TRITON_CACHE_DIR=str(tmp_path)
    )
    lines = output.splitlines()
    assert len(lines) == 19
    spilled = [int(line.split()[1]) for line in lines]
    # decode alone; with norm, rotation and cache write; the same with drafts; for Hopper with 8 and 16 rows, with heads
    # of three sizes; prefill; decode and prefill with a soft cap; prefill for Hopper with queries by TMA, and
    # without; tiled linear layers for Hopper; decode, prefill, and decode with all before it, of KV in 8 bits
    most = (64, 96, 320, *[0] * 6, 32, 64, 32, 32, 32, 0, 0, 64, 32, 96)
    assert all(found <= limit for found, limit in zip(spilled, most, strict=True)), lines
    # a program for Hopper has room beside a product: see `ProductTiling.beside_attention`
    for line, head_dim in zip(lines[3:9], (64, 96, 128) * 2, strict=True):
        _, registers, shared = map(int, re.findall(r"(\d+) (?:bytes|registers)", line))
        assert registers <= 128 and (head_dim == 96 or shared <= attention_bytes(head_dim)), line


@interpreted
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("requests", [DECODES, [(3, 50), (3, 3), (3, 17), (3, 34), (3, 131)]], ids=["plain", "drafts"])
@pytest.mark.parametrize("window", [None, 20])
def test_fused_norm_rotation_and_write(requests: Requests, head_dim: int, has_norm: bool, window: int | None) -> None:
    """The kernel with its inputs as the linear layer returns them, against the references of the two operations."""
    others: dict[str, Any] = {"norm_offset": 1.0, "soft_cap": 2.0} if has_norm and window else {}
    batch = make_fused_batch(requests, head_dim=head_dim, has_norm=has_norm, **others)
    workspace = AttentionWorkspace(CPU, 5)
    batch.check(lambda: batch.decode(workspace, window, TILING, torch.ones(37, 24)), BOUND[torch.float32], window)


def test_how_much_of_a_weight_is_prefetched() -> None:
    def rows(*shape: int) -> tuple[int, int, int, int]:
        return decode._prefetch_arguments(torch.empty(shape, dtype=torch.bfloat16, device="meta"), 528)

    assert rows(4096, 4096) == (4096, 8, 8192, 8192)
    assert rows(16384, 16384) == (16384, 32, 32768, 2048)  # a stretch of every row, 32 MB in all
    assert rows(100, 20) == decode._prefetch_arguments(None, 528) == (0, 0, 0, 0)  # rows of 40 bytes are not aligned
