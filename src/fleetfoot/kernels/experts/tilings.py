"""The tiles of products of experts and of their routing: all that is chosen by the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fleetfoot.kernels.experts.experts import ExpertSizes
from fleetfoot.kernels.quantized.packed import BLOCK
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2

FEW_ROWS = 16
"""Most tokens whose experts are not sorted: each is a slot of one matrix instruction, which computes 8 or 16."""
_MOST_SPLITS = 32
"""Ranges of inputs of a product of the router."""
_LEAST_DIVIDED, _MOST_CHOOSING = 1024, 4
"""Logits of a few tokens from which on several programs choose their experts, and how many. On an H100, us for 8 tokens
with one program and with several: 256 experts 13.2 and 8.6, 128 experts 6.5 and 6.8, 32 experts 5.0 and 5.4."""
_TOKENS_PER_SM = 2, 16
"""Tokens for each multiprocessor up to which a tile of the router has 16 and 32 of them; more: 64."""


def router_rows(num_rows: int, num_sms: int) -> int:
    """Tokens of a tile of the router: few where more would leave multiprocessors idle."""
    few, some = _TOKENS_PER_SM
    return 16 if num_rows <= max(FEW_ROWS, few * num_sms) else 32 if num_rows <= some * num_sms else 64


def router_splits(num_rows: int, num_steps: int, num_sms: int) -> int:
    """Programs for a tile of the router, each with a range of its ``num_steps`` steps of inputs."""
    tiles, splits = cdiv(num_rows, router_rows(num_rows, num_sms)), 1
    while splits < _MOST_SPLITS and tiles * splits * 2 <= num_sms:
        splits *= 2
    return min(splits, num_steps)


def choosing_rows(num_rows: int, padded: int) -> int:
    """The tokens, of at most `FEW_ROWS`, whose experts one program chooses. ``padded``: experts, a power of 2."""
    rows = next_power_of_2(num_rows)
    return rows if rows * padded < _LEAST_DIVIDED else next_power_of_2(cdiv(num_rows, _MOST_CHOOSING))


@dataclass(frozen=True, slots=True)
class OneTiling:
    """The tile of a product of one token; see `choose_one_tiling`."""

    outputs: int
    spans: int
    """Spans of inputs in a step. Those of a span share a scale."""
    num_warps: int


def is_one(num_rows: int, form: str) -> bool:
    """Whether a token is multiplied value by value: codes of 4 bits are by the tensor cores alone. ``form``: as of
    `ProductShape`."""
    return num_rows == 1 and form != "packed"


def choose_one_tiling(*, is_down: bool) -> OneTiling:
    """Small tiles in many programs. On an H100, us of both products of Qwen3-30B-A3B's experts in FP8 with other tiles
    of the first one: 4 outputs of 8 spans 21.5, 8 of 8 21.4, 8 of 4 25.9, 16 of 2 24.4 (in bfloat16 30.5, 33.9, 35.3
    and 30.5); with 1, 2, 4 and 8 outputs of the second one 20.3, 20.9, 23.3 and 21.1.

    Args:
        is_down: of the second product.
    """
    return OneTiling(1, 1, 4) if is_down else OneTiling(4, 8, 4)


@dataclass(frozen=True, slots=True)
class FewTiling:
    """The steps of products of few tokens; see `choose_few_tiling`."""

    outputs: int
    """Outputs of a program."""
    inputs: int
    """Inputs of each of ``slices`` in a step."""
    slices: int
    num_stages: int


def choose_few_tiling(num_rows: int, form: str, element_size: int, shared: int, *, is_down: bool) -> FewTiling:
    """A program has a few steps, so that few stages hold most of its inputs, and more programs have room beside it.

    On an H100, us of both products of Qwen3-30B-A3B's experts in FP8 for 8 tokens with other tiles of the second one:
    32 outputs in 2 slices of 128 inputs and 2 stages 93.6, 16 outputs 94.7, 4 slices of 64 in 3 stages 96.1, in 6
    stages 112, in 10 143. In bfloat16, 4 slices of 64 in 3 stages take 169.4, in 10 214.6; GPT-OSS-20B's in MXFP4
    168.9 with 32 outputs and 2 stages, 177 with 16, 221 with 4 stages.

    Args:
        form: as of `ProductShape`.
        shared: bytes of a program at most.
        is_down: of the second product.
    """
    if form == "plain":
        outputs, inputs, slices, stages = 16, 128 // element_size, 4, 3
    elif num_rows == 1 and form == "packed":
        outputs, inputs, slices, stages = (16, BLOCK, 2, 6) if is_down else (16, BLOCK, 4, 2)
    else:
        outputs, inputs, slices, stages = 32 if is_down else 16, BLOCK, 2, 2
    weight_bytes = slices * inputs * {"plain": 2 * element_size, "scaled": 2, "packed": 1}[form] // 2
    x_bytes = padded_few_rows(num_rows) * slices * inputs * element_size
    step_bytes = outputs * (1 if is_down else 2) * weight_bytes + x_bytes
    return FewTiling(outputs, inputs, slices, max(2, min(stages, shared // step_bytes)))


def padded_few_rows(num_rows: int) -> int:
    """The tokens that a product of few computes: the tensor cores have no fewer than 8."""
    return 8 if num_rows <= 8 else FEW_ROWS


@dataclass(frozen=True, slots=True)
class GroupTiling:
    """The tiles of grouped products; see `choose_group_tiling`."""

    rows: int
    """Pairs of tokens and experts."""
    outputs: int
    """Outputs of the first product, each with a gate and an up."""
    down_outputs: int
    inputs: int
    num_warps: int
    num_stages: int


_TILINGS: dict[str, tuple[tuple[GroupTiling, float], ...]] = {
    "plain": (
        (GroupTiling(16, 64, 128, 128, 4, 3), 0.12),
        (GroupTiling(32, 128, 128, 128, 8, 3), 0.22),
        (GroupTiling(64, 128, 128, 64, 8, 4), 0.45),
        (GroupTiling(128, 128, 256, 64, 8, 4), 0.75),
    ),
    # Each step's sums are scaled before they are added, so that more rows or outputs have no room in registers.
    "scaled": (
        (GroupTiling(16, 64, 64, 128, 4, 3), 0.13),
        (GroupTiling(32, 64, 64, 128, 4, 3), 0.17),
        (GroupTiling(64, 64, 64, 128, 4, 3), 0.30),
    ),
    "packed": (
        (GroupTiling(16, 64, 64, BLOCK, 4, 3), 0.19),
        (GroupTiling(32, 64, 64, BLOCK, 4, 3), 0.23),
        (GroupTiling(64, 64, 64, BLOCK, 4, 3), 0.39),
    ),
    "e2m1": (
        (GroupTiling(16, 64, 64, BLOCK, 4, 3), 0.15),
        (GroupTiling(32, 64, 128, BLOCK, 4, 3), 0.27),
        (GroupTiling(64, 64, 128, BLOCK, 4, 3), 0.34),
        (GroupTiling(128, 128, 128, BLOCK, 8, 3), 0.49),
    ),
}
"""Tilings for each form of weights, and the part of the arithmetic throughput that their products reach while
weights come from L2; see `docs/experiments/experts.md`."""
_FLOPS_PER_BYTE = 220.0
"""Operations on the tensor cores in the time of a byte from memory."""
_L2_RATE = 2.0
"""Bytes from L2 in the time of one from memory."""


@lru_cache(maxsize=4096)
def choose_group_tiling(num_pairs: int, sizes: ExpertSizes, form: str, element_size: int, shared: int) -> GroupTiling:
    """The tiling that takes the least time by estimate: the weights of all experts from memory, those of further tiles
    of an expert from L2, and the arithmetic with that of rows without a pair.

    Args:
        form: as of `ProductShape`; ``e2m1``: packed for products in bfloat16, where scales are factors of the weights.
        shared: bytes of a program at most.
    """
    active = min(sizes.num_experts, num_pairs)
    weights = 3 * sizes.size * sizes.hidden_size
    weight_size = {"plain": element_size, "scaled": 1}.get(form, 0.53)

    def cost(choice: tuple[GroupTiling, float]) -> float:
        rows, efficiency = choice[0].rows, choice[1]
        tiles = active * max(1.0, num_pairs / active / rows + 0.5)
        read = (active + (tiles - active) / _L2_RATE) * weights * weight_size
        computed = tiles * rows * weights * 2 / (_FLOPS_PER_BYTE * efficiency)
        return max(read, computed)

    found = min(_TILINGS[form], key=cost)[0]
    inputs = found.inputs if form in ("packed", "e2m1") else found.inputs * 2 // element_size
    step_bytes = int((2 * found.outputs * weight_size + found.rows * element_size) * inputs)
    return replace(found, inputs=inputs, num_stages=max(2, min(found.num_stages, shared // step_bytes)))
