"""What kernels that draw share: the start of a program, scores as integers, and noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetfoot.kernels.runtime.dependent_launch import launch_dependents, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


@triton_kernel()
def begin_row(rows_ptr, temperatures_ptr, has_rows: tl.constexpr, overlap: tl.constexpr):
    """Wait for the inputs. Returns the program's request, its row (-1: padding) and the row's temperature."""
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    row = request
    if has_rows:
        row = tl.load(rows_ptr + request).to(tl.int64)
    return request, row, tl.load(temperatures_ptr + row, mask=row >= 0, other=0.0)


@triton_kernel()
def score_depth(logit, highest, temperature):
    """int32 depth of a score: 0 for the best token, larger for lower scores.

    A score is ``(logit - highest) / temperature``, at most 0: its bits without the sign are integers of reverse order.
    """
    return tl.div_rn(logit - highest, temperature).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton_kernel()
def mass_of(depth):
    """int64: the probability relative to the best token's, in units of 2**-40. Sums do not depend on their order."""
    return (tl.exp(-depth.to(tl.float32, bitcast=True)) * 1099511627776.0).to(tl.int64)


@triton_kernel()
def eighths(low, high):
    """``[8]`` bounds from ``low`` to ``high`` (inclusive)."""
    step = tl.maximum((high - low + 7) // 8, 1)
    return tl.minimum(low + (tl.arange(0, 8) + 1) * step, high)


@triton_kernel()
def random_words(seed, position, block):
    """The four words of ``block``'s tokens, as `fleetfoot.kernels.sampling.gumbel` defines them.

    Products have 64 bits, so that one instruction computes both halves: `tl.philox` multiplies twice.
    """
    word0 = block.to(tl.uint32)
    word1 = word0 * 0 + position.to(tl.uint32)
    word2 = word0 * 0
    word3 = word2
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        low = word0.to(tl.uint64) * 0xD2511F53
        high = word2.to(tl.uint64) * 0xCD9E8D57
        word0 = (high >> 32).to(tl.uint32) ^ word1 ^ key0
        word1 = high.to(tl.uint32)
        word2 = (low >> 32).to(tl.uint32) ^ word3 ^ key1
        word3 = low.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return word0, word1, word2, word3


@triton_kernel()
def words_of_tokens(seed, position, index, count: tl.constexpr):
    """``[count]`` words, of the tokens from ``index`` (a multiple of 4) on."""
    words = random_words(seed, position, index // 4 + tl.arange(0, count // 4))
    return tl.interleave(tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3]))


@triton_kernel()
def exact_noise(seed, position, index):
    """`fleetfoot.kernels.sampling.gumbel.gumbel_noise_at` of one token."""
    word0, word1, word2, word3 = random_words(seed, position, index // 4)
    lane = index % 4
    word = tl.where(lane < 2, tl.where(lane == 0, word0, word1), tl.where(lane == 2, word2, word3))
    uniform = ((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton_kernel()
def rough_noise(word):
    """The noise of tokens with these words, with an error below 0.01."""
    step = (word >> 9).to(tl.float32)
    uniform = (step + 0.5) * (1.0 / 8388608.0)
    rest = (8388607.5 - step) * (1.0 / 8388608.0)  # 1 - uniform, exactly
    series = rest * (1.0 + rest * (0.5 + rest * (0.31 + rest * 0.47)))  # -log(1 - rest) for rest up to a half
    exponential = tl.where(rest < 0.5, series, -0.6931472 * rough_log2(uniform))
    return -0.6931472 * rough_log2(exponential)


@triton_kernel()
def rough_log2(x):
    """The binary logarithm of normal positive numbers, with an error below 0.001."""
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    line = bits.to(tl.float32) * (1.0 / 8388608.0) - 127.0  # exponent + fraction
    return line + fraction * (1.0 - fraction) * (0.4427 + fraction * (0.0836 * fraction - 0.2476))
