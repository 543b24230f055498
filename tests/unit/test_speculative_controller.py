"""Drafting turns itself off where it does not pay, and on again where it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from fleetfoot.speculative.controller import FIRST_PATIENCE, LONGEST_PATIENCE, MEASURING, NUM_SAMPLES, AdaptiveDrafts

K = 3


def play(
    controller: AdaptiveDrafts,
    num_steps: int,
    num_decodes: int = 4,
    accepted: float = 2.0,
    seconds: Callable[[int], float] = lambda num_drafts: 1.5 if num_drafts else 1.0,
) -> list[str]:
    """Steps one after the other; returns for each why it had no drafts."""
    reasons = []
    for _ in range(num_steps):
        num_drafts = controller.choose(num_decodes)
        assert num_drafts == (0 if controller.off_reason else K)
        reasons.append(controller.off_reason)
        num_accepted = round(accepted * num_decodes) if num_drafts else 0
        controller.observe(
            num_decodes, num_drafts, K * num_decodes, num_accepted, num_decodes * (1 + num_drafts), seconds(num_drafts)
        )
    return reasons


def test_where_drafts_pay_they_are_kept_but_for_trials() -> None:
    reasons = play(AdaptiveDrafts(K), 20 * FIRST_PATIENCE)
    assert set(reasons) == {"", MEASURING}
    assert reasons[:NUM_SAMPLES] == [""] * NUM_SAMPLES
    assert reasons[NUM_SAMPLES : 2 * NUM_SAMPLES] == [MEASURING] * NUM_SAMPLES
    trials = Counter(reasons)[MEASURING] / NUM_SAMPLES
    assert 2 <= trials <= 6  # ever rarer


@pytest.mark.parametrize(
    ("accepted", "longer"), [(0.0, 1.1), (0.25, 1.5), (2.0, 3.5)], ids=["none accepted", "few", "steps too long"]
)
def test_where_they_do_not_pay_they_are_turned_off(accepted: float, longer: float) -> None:
    controller = AdaptiveDrafts(K)
    reasons = play(controller, 2000, accepted=accepted, seconds=lambda num_drafts: longer if num_drafts else 1.0)
    assert reasons[-1] == "it does not pay at 4 to 7 requests"
    assert Counter(reasons)[""] <= 4 * NUM_SAMPLES


def test_it_looks_again_when_the_text_changes() -> None:
    controller = AdaptiveDrafts(K)
    play(controller, 400, accepted=0.0)
    reasons = play(controller, 2 * FIRST_PATIENCE + 4 * NUM_SAMPLES, accepted=2.5)
    assert reasons[0] == "it does not pay at 4 to 7 requests"
    assert reasons[-1] == ""
    assert LONGEST_PATIENCE >= FIRST_PATIENCE


def test_batch_sizes_are_judged_apart() -> None:
    controller = AdaptiveDrafts(K)
    play(controller, 100, num_decodes=64, seconds=lambda num_drafts: 4.0 if num_drafts else 1.0)
    play(controller, 100, num_decodes=2)
    assert controller.choose(64) == 0
    assert controller.off_reason == "it does not pay at 64 to 127 requests"
    assert controller.choose(100) == 0
    assert controller.choose(2) == K
    assert controller.off_reason == ""


def test_a_slow_step_now_and_then_is_not_held_against_drafts() -> None:
    controller, numbers = AdaptiveDrafts(K), iter(range(10**6))
    play(controller, 300, seconds=lambda n: 100.0 if n and next(numbers) % 4 == 0 else 1.2 if n else 1.0)
    assert controller.choose(4) == K


def test_a_limit_of_requests() -> None:
    controller = AdaptiveDrafts(K, max_num_decodes=8)
    assert controller.choose(8) == K
    assert controller.choose(9) == 0
    assert controller.off_reason == "more than 8 requests"


def test_steps_with_prefills_are_not_compared() -> None:
    controller = AdaptiveDrafts(K)
    for _ in range(10 * NUM_SAMPLES):
        controller.observe(4, K, 4 * K, 0, 4 * (1 + K) + 100, 50.0)
    assert play(controller, NUM_SAMPLES + 1)[-1] == MEASURING
