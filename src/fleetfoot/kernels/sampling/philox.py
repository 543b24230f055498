"""Philox4x32-10: counter-based random integers, the same on every device and in every batch.

A counter-based generator is a keyed hash: it maps (key, counter) to random words and keeps no state, so any element
of the stream can be computed alone, in any order, by anyone. Source: Salmon, Moraes, Dror, Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011.

The convention
--------------
Every implementation (this one, the Triton kernels, native code) computes exactly these integers. For the request's
64-bit seed ``s``, the position ``p`` of the token being sampled (its index in the sequence, from 0, counting the
prompt: the first token sampled after a prompt of 7 has position 7), and the vocabulary index ``v``:

    key     = (s & 0xffffffff, s >> 32)
    counter = (v >> 2, p, stream, 0)
    word    = philox_4x32_10(counter, key)[v & 3]

so one evaluation serves four neighbouring vocabulary indices. ``stream`` keeps uses apart that would otherwise draw the
same words (the ``STREAM_*`` constants). The word becomes a float32 in the open interval (0, 1) by

    uniform = ((word >> 9) + 0.5) * 2**-23

which is exact: ``(word >> 9) + 0.5`` has at most 24 significant bits. Neither 0 nor 1 can occur, so ``-log(-log(u))``
(gumbel.py) is always finite.

Why int64
---------
torch has no full set of uint32 operations, so a 32-bit word lives in the low half of an int64. A product of two words
needs 64 unsigned bits and may exceed int64: the machine wraps it modulo 2**64, which keeps all 64 bits, merely read as
a negative number. ``>> 32`` is arithmetic and fills the upper half with copies of the sign, and masking to 32 bits
afterwards leaves bits 32..63 of the product, the high word; masking the product itself gives the low word. Words that
are only ever XORed may carry rubbish above bit 31 until the next mask, so one mask a round is enough.
"""

import torch

STREAM_GUMBEL = 0  # noise of the sampler
STREAM_ACCEPT = 1  # acceptance of draft tokens in rejection sampling
STREAM_RECOVER = 2  # tokens drawn in place of rejected drafts

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
_KEY_BUMPS = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round

Word = torch.Tensor | int


def philox_4x32(
    counter0: Word, counter1: Word, counter2: Word, counter3: Word, key0: torch.Tensor, key1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four output words of Philox4x32-10 for each element.

    Counter words are ints or int64 tensors and key words int64 tensors, all in [0, 2**32), that broadcast together on
    one device. Returns four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
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
    # Two buffers for the products, since a round still reads the products of the round before.
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


def uniform_from_word(word: torch.Tensor) -> torch.Tensor:
    """Map words in [0, 2**32) to float32 in (0, 1), exactly: ``((word >> 9) + 0.5) * 2**-23``."""
    return (word >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)


def key_words(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split 64-bit seeds (int64, any sign: the bits count) into the two key words."""
    return seeds & _MASK, (seeds >> 32) & _MASK


def _round_keys(key0: torch.Tensor, key1: torch.Tensor, ndim: int) -> torch.Tensor:
    """The keys of all rounds, ``[10, 2, *key shape]``, padded with leading ones to ``ndim`` key dimensions."""
    key = torch.stack(torch.broadcast_tensors(key0, key1))  # [2, *key shape]
    key = key.view(2, *[1] * (ndim + 1 - key.ndim), *key.shape[1:])
    bumps = torch.arange(_ROUNDS, device=key.device).unsqueeze(1) * torch.tensor(_KEY_BUMPS, device=key.device)
    return (key.unsqueeze(0) + bumps.view(_ROUNDS, 2, *[1] * ndim)) & _MASK
