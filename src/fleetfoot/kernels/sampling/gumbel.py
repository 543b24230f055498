"""Gumbel-max sampling with counter-based random numbers: the noise of a token depends on nothing but its coordinates.

A draw from softmax(scores) is the argmax of the scores plus independent Gumbel noise (Gumbel, "Statistical Theory of
Extreme Values and Some Practical Applications", 1954). The random integers are Philox4x32-10, a keyed hash of a counter
(Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), which has no state: any element
can be computed alone, in any order, on any device.

Every implementation (this one, the Triton kernels, native code) computes the same integers. For the request's 64-bit
seed ``s``, the position ``p`` of the token to sample (its index in the sequence, from 0, including the prompt) and the
vocabulary index ``v``:

    key     = (s & 0xffffffff, s >> 32)
    counter = (v >> 2, p, 0, 0)
    word    = philox_4x32_10(counter, key)[v & 3]
    uniform = ((word >> 9) + 0.5) * 2**-23         exact in float32, in the open interval (0, 1)
    noise   = -log(-log(uniform))                  finite
    token   = argmax(score + noise)                the lowest index among equals

so one Philox call serves four neighbouring vocabulary indices, and tokens that cannot win need no noise.
"""

import torch

from fleetfoot.kernels.sampling import rows_per_chunk

NOISE_MIN, NOISE_MAX = -2.8116, 16.6356
"""Bounds of the noise, rounded outwards: ``uniform`` lies in [2**-24, 1 - 2**-24]."""

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
_KEY_BUMPS = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round
_SPAN = NOISE_MAX - NOISE_MIN + 0.01  # the hundredth covers the rounding of sums near the bounds
# Noise for one token in this many costs as much as for all: neighbours share a Philox call, scattered tokens do not.
_SPARSE_FRACTION = 16

Word = torch.Tensor | int


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The noise of the whole vocabulary for ``n`` rows.

    Args:
        seeds: ``[n]`` int64, 64-bit patterns. positions: ``[n]`` int64.

    Returns ``[n, vocab_size]`` float32 (rows padded in memory to a multiple of 4). Temporaries are bounded.
    """
    num_blocks = -(-vocab_size // 4)
    noise = torch.empty(len(seeds), num_blocks, 4, device=seeds.device)  # [n, num_blocks, 4]
    blocks = torch.arange(num_blocks, device=seeds.device)
    step = rows_per_chunk(vocab_size, seeds.device)
    for start in range(0, len(seeds), step):
        chunk = slice(start, start + step)
        keys = seeds[chunk, None]
        words = philox_4x32(blocks, positions[chunk, None], 0, 0, keys & _MASK, (keys >> 32) & _MASK)
        for i, word in enumerate(words):
            noise[chunk, :, i] = uniform_from_word(word)
    return _gumbel_(noise.view(len(seeds), num_blocks * 4))[:, :vocab_size]


def gumbel_noise_at(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The noise of single tokens: entry ``i`` is ``gumbel_noise(seeds, positions, ...)[i, token_ids[i]]``, bitwise.

    All arguments ``[m]`` int64; returns ``[m]`` float32.
    """
    words = torch.stack(philox_4x32(token_ids >> 2, positions, 0, 0, seeds & _MASK, (seeds >> 32) & _MASK))  # [4, m]
    return _gumbel_(uniform_from_word(words.gather(0, (token_ids & 3).unsqueeze(0)).squeeze(0)))


def gumbel_argmax(
    scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, *, on_host: bool = False
) -> torch.Tensor:
    """Draw one token per row from softmax(scores); destroys ``scores``.

    Args:
        scores: ``[n, vocab]`` float32, shifted so that each row's maximum is 0; -inf excludes a token.
        seeds, positions: ``[n]`` int64.
        on_host: read values of CPU tensors, where that takes less work; False: no host synchronisation.

    Returns ``[n]`` int64. A row that contains NaN gets some token of the vocabulary.
    """
    if on_host:
        contenders = scores > -_SPAN  # nothing below can exceed the row's best token, whatever the noise
        if _SPARSE_FRACTION * int(torch.count_nonzero(contenders)) < scores.numel():
            rows, token_ids = contenders.nonzero(as_tuple=True)  # [m], [m]
            noisy = scores[rows, token_ids] + gumbel_noise_at(seeds[rows], positions[rows], token_ids)
            scores.fill_(-torch.inf)
            scores[rows, token_ids] = noisy
            return scores.argmax(dim=-1)
    return scores.add_(gumbel_noise(seeds, positions, scores.shape[1])).argmax(dim=-1)


def _gumbel_(uniform: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)), in place."""
    return uniform.log_().neg_().log_().neg_()


def uniform_from_word(word: torch.Tensor) -> torch.Tensor:
    """Map words in [0, 2**32) to float32 in (0, 1), exactly: ``((word >> 9) + 0.5) * 2**-23``."""
    return (word >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)


def philox_4x32(
    counter0: Word, counter1: Word, counter2: Word, counter3: Word, key0: torch.Tensor, key1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four output words of Philox4x32-10 for each element.

    Counter words are ints or int64 tensors and key words int64 tensors, all in [0, 2**32), that broadcast together on
    one device. Returns four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
    # torch has no full set of uint32 operations, so a word is the low half of an int64. A product of two words may
    # exceed int64: it wraps modulo 2**64, which preserves all 64 bits. ``>> 32`` is arithmetic, so the high word is
    # right after masking. Words that are only XORed may have other bits above bit 31 until the next mask.
    device = key0.device
    words = torch.broadcast_tensors(
        *(torch.as_tensor(word, dtype=torch.int64, device=device) for word in (counter0, counter1, counter2, counter3)),
        key0,
        key1,
    )
    shape = words[0].shape
    multiplied = torch.stack((words[0], words[2]))  # [2, *shape], the words that the round multiplies
    xored0, xored1 = words[1], words[3]  # the words that the round only XORs
    keys = _round_keys(key0, key1, len(shape))  # [10, 2, *key shape]
    # Two buffers for the products, since a round still reads the products of the previous round.
    products = (torch.empty_like(multiplied), torch.empty_like(multiplied))
    high = torch.empty_like(multiplied)
    factors = torch.tensor(_MULTIPLIERS, device=device).view(2, *[1] * len(shape))
    for i in range(_ROUNDS):
        product = products[i & 1]
        torch.mul(multiplied, factors, out=product)
        torch.bitwise_right_shift(product, 32, out=high)
        torch.bitwise_xor(high[1], xored0, out=multiplied[0])
        torch.bitwise_xor(high[0], xored1, out=multiplied[1])
        multiplied.bitwise_xor_(keys[i]).bitwise_and_(_MASK)
        xored0, xored1 = product[1], product[0]
    return multiplied[0], xored0 & _MASK, multiplied[1], xored1 & _MASK


def _round_keys(key0: torch.Tensor, key1: torch.Tensor, ndim: int) -> torch.Tensor:
    """The keys of all rounds, ``[10, 2, *key shape]``, padded with leading ones to ``ndim`` key dimensions."""
    key = torch.stack(torch.broadcast_tensors(key0, key1))  # [2, *key shape]
    key = key.view(2, *[1] * (ndim + 1 - key.ndim), *key.shape[1:])
    bumps = torch.arange(_ROUNDS, device=key.device).unsqueeze(1) * torch.tensor(_KEY_BUMPS, device=key.device)
    return (key.unsqueeze(0) + bumps.view(_ROUNDS, 2, *[1] * ndim)) & _MASK
