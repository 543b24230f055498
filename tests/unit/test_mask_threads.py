"""How many threads compute token masks follows the times of earlier steps."""

import pytest

from fleetfoot.structured.masks import ThreadChoice

NUMBERS = (0, 2, 8)


def run(choice: ThreadChoice, num_steps: int, fastest: int, num_masks: int = 64) -> list[int]:
    """What is chosen, step by step, while one number of threads takes half of the others' time."""
    chosen = []
    for _ in range(num_steps):
        chosen.append(choice.choose(num_masks))
        choice.note(num_masks, 1.0 if chosen[-1] == fastest else 2.0, chosen[-1])
    return chosen


@pytest.mark.parametrize("first", NUMBERS)
@pytest.mark.parametrize("later", NUMBERS)
def test_the_fastest_is_chosen_and_the_others_are_tried_again(first: int, later: int) -> None:
    choice = ThreadChoice(NUMBERS)
    assert set(run(choice, 24, first)) == {*NUMBERS}
    assert run(choice, 1000, first).count(first) > 980
    assert run(choice, 1000, later)[500:].count(later) > 490  # when the machine changes, so does the choice


def test_few_masks_need_no_threads() -> None:
    assert set(run(ThreadChoice(NUMBERS), 100, 8, num_masks=4)) == {0}
