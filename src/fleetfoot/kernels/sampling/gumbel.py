"""Gumbel-max sampling: a draw from softmax(scores) is the argmax of the scores plus independent Gumbel noise.

Source: Gumbel, "Statistical Theory of Extreme Values and Some Practical Applications", 1954. Here the noise of a token
is a function of the request's seed, the position and the vocabulary index alone (philox.py gives the convention):

    noise = -log(-log(uniform))                    in float32
    token = argmax(score + noise)                  the lowest index among equals

so a draw needs no state and no order, and tokens that cannot win need no noise at all.
"""

import torch

from fleetfoot.kernels.sampling.philox import STREAM_GUMBEL, key_words, philox_4x32, uniform_from_word

NOISE_MIN, NOISE_MAX = -2.8116, 16.6356
"""Bounds of the noise, rounded outwards: ``uniform`` lies in [2**-24, 1 - 2**-24]."""

_SPAN = NOISE_MAX - NOISE_MIN + 0.01  # the hundredth covers the rounding of sums near the bounds
_MAX_ELEMENTS = {"cpu": 1 << 20}  # noise made at once: what stays in cache
_MAX_ELEMENTS_ELSEWHERE = 1 << 24  # 64 MiB of float32, and twice as much in integers
# Noise for one token in this many costs as much as for all: neighbours share a Philox call, scattered tokens do not.
_SPARSE_FRACTION = 16


def rows_per_chunk(vocab_size: int, device: torch.device) -> int:
    """How many rows of logits to work on at once, so that temporaries stay small whatever the batch."""
    return max(1, _MAX_ELEMENTS.get(device.type, _MAX_ELEMENTS_ELSEWHERE) // vocab_size)


def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, stream: int = STREAM_GUMBEL
) -> torch.Tensor:
    """The noise of the whole vocabulary for ``n`` rows.

    Args:
        seeds: ``[n]`` int64, 64-bit patterns. positions: ``[n]`` int64.

    Returns ``[n, vocab_size]`` float32 (rows padded in memory to a multiple of 4). Temporaries are bounded.
    """
    num_blocks = -(-vocab_size // 4)  # one Philox call serves four tokens
    noise = torch.empty(len(seeds), num_blocks, 4, device=seeds.device)  # [n, num_blocks, 4]
    blocks = torch.arange(num_blocks, device=seeds.device)
    step = rows_per_chunk(vocab_size, seeds.device)
    for start in range(0, len(seeds), step):
        chunk = slice(start, start + step)
        words = philox_4x32(blocks, positions[chunk, None], stream, 0, *key_words(seeds[chunk, None]))
        for i, word in enumerate(words):
            noise[chunk, :, i] = uniform_from_word(word)
    return _gumbel_(noise.view(len(seeds), num_blocks * 4))[:, :vocab_size]


def gumbel_noise_at(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, stream: int = STREAM_GUMBEL
) -> torch.Tensor:
    """The noise of single tokens: entry ``i`` is ``gumbel_noise(seeds, positions, ...)[i, token_ids[i]]``, bit for bit.

    All arguments ``[m]`` int64; returns ``[m]`` float32.
    """
    words = torch.stack(philox_4x32(token_ids >> 2, positions, stream, 0, *key_words(seeds)))  # [4, m]
    return _gumbel_(uniform_from_word(words.gather(0, (token_ids & 3).unsqueeze(0)).squeeze(0)))


def gumbel_argmax(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one token per row from softmax(scores); destroys ``scores``.

    Args:
        scores: ``[n, vocab]`` float32, shifted so that each row's maximum is 0; -inf excludes a token.
        seeds, positions: ``[n]`` int64.

    Returns ``[n]`` int64. A row that holds NaN gets some token of the vocabulary.
    """
    if scores.device.type == "cpu":  # elsewhere, counting the contenders would stall the device
        contenders = scores > -_SPAN  # nothing below can beat the row's best token, whatever the noise
        if _SPARSE_FRACTION * int(torch.count_nonzero(contenders)) < scores.numel():
            return _sparse_argmax(scores, contenders, seeds, positions)
    return scores.add_(gumbel_noise(seeds, positions, scores.shape[1])).argmax(dim=-1)


def _sparse_argmax(
    scores: torch.Tensor, contenders: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """`gumbel_argmax` with noise for the contenders ``[n, vocab]`` (bool) alone: the same tokens for less work."""
    rows, token_ids = contenders.nonzero(as_tuple=True)  # [m], [m]
    noisy = scores[rows, token_ids] + gumbel_noise_at(seeds[rows], positions[rows], token_ids)
    scores.fill_(-torch.inf)
    scores[rows, token_ids] = noisy
    return scores.argmax(dim=-1)


def _gumbel_(uniform: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)), in place."""
    return uniform.log_().neg_().log_().neg_()
