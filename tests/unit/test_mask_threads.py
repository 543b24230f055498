"""Whether token masks are computed in threads follows the times of earlier steps."""

import pytest

from fleetfoot.structured.masks import ThreadChoice


def run(choice: ThreadChoice, num_steps: int, seconds: dict[bool, float], num_masks: int = 64) -> list[bool]:
    """What is chosen, step by step, while each way takes so long."""
    chosen = []
    for _ in range(num_steps):
        chosen.append(choice.choose(num_masks))
        choice.note(num_masks, seconds[chosen[-1]], in_threads=chosen[-1])
    return chosen


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_chosen_and_the_other_is_tried_again(faster: bool) -> None:
    choice = ThreadChoice()
    assert set(run(choice, 16, {faster: 1.0, not faster: 2.0})) == {True, False}
    chosen = run(choice, 1000, {faster: 1.0, not faster: 2.0})
    assert 0 < chosen.count(not faster) < 10
    changed = run(choice, 1000, {faster: 2.0, not faster: 1.0})  # when the machine changes, so does the choice
    assert changed[300:].count(not faster) > 690


def test_few_masks_need_no_threads() -> None:
    choice = ThreadChoice()
    assert not any(run(choice, 100, {True: 1.0, False: 2.0}, num_masks=4))
