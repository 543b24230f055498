"""The 64 bits that all random numbers of one sequence derive from. Plain Python: admission needs no torch."""

from __future__ import annotations

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_SEEDED, _UNSEEDED = 1, 2  # keep a request's own seeds and the engine's apart


def request_seed(seed: int | None, index: int, engine_seed: int = 0, counter: int = 0) -> int:
    """The seed of copy ``index`` (of ``n``) of a request, in [0, 2**64).

    With ``seed`` given, the result depends on ``seed`` and ``index`` alone: the same request gives the same tokens in
    any engine, and its copies differ. Without, it depends on ``engine_seed``, ``counter`` (which must differ from
    request to request; the order of arrival will do) and ``index``. Negative seeds count as their 64-bit pattern.
    """
    words = (_SEEDED, seed, index) if seed is not None else (_UNSEEDED, engine_seed, counter, index)
    state = 0
    for word in words:
        state = _mix(state ^ (word & _MASK))
    return state


def _mix(state: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

    A bijection of 64-bit words that spreads every input bit over all output bits.
    """
    state = (state + _GOLDEN_GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
