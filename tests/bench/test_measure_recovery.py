"""The delay caused by killed ranks, computed from recorded steps."""

from __future__ import annotations

import pytest

from hvdtrain.bench.measure_recovery import StepEnd, find_losses, rows_needed

ALL, TWO, ONE = (0, 1, 2), (1, 2), (1,)
STEPS = [
    *(StepEnd(10.0, ALL), StepEnd(11.0, ALL), StepEnd(12.0, ALL), StepEnd(17.0, ALL)),
    *(StepEnd(19.0, TWO), StepEnd(23.0, TWO), StepEnd(25.0, TWO), StepEnd(27.0, TWO)),
    *(StepEnd(28.0, ONE), StepEnd(28.5, ONE), StepEnd(29.0, ONE)),
]


def test_the_delay_of_each_loss() -> None:
    first, second = find_losses(STEPS, {0: 17.25, 1: 0.0, 2: 27.5})
    assert (first.rank, first.ranks, first.chief) == (0, 3, True)
    assert (second.rank, second.ranks, second.chief) == (2, 2, False)
    # Medians of 1, 1 and 5, and of 4, 2 and 2.
    assert (first.normal_step_s, second.normal_step_s) == (1.0, 2.0)
    assert (first.into_step_s, second.into_step_s) == (0.25, 0.5)
    assert (first.next_step_s, first.beyond_s) == (1.75, 0.75)
    assert (first.step_after_s, first.after_beyond_s) == (4.0, 3.0)
    assert (second.next_step_s, second.beyond_s) == (0.5, -1.5)
    assert (second.step_after_s, second.after_beyond_s) == (0.5, -1.5)


def test_a_step_that_contains_the_killed_rank_is_not_counted() -> None:
    # The rank was killed after other ranks had received its gradients for this step.
    (loss,) = find_losses(STEPS, {0: 16.75})
    assert loss.next_step_s == 2.25
    assert loss.step_after_s == 4.0


@pytest.mark.parametrize("killed_s", [{}, {0: 0.0}, {0: 5.0}, {2: 29.5}])
def test_losses_without_steps_before_and_after_them_are_ignored(killed_s: dict[int, float]) -> None:
    assert find_losses(STEPS, killed_s) == []


def test_the_epoch_is_long_enough_for_all_losses() -> None:
    between_steps, batch_size = 20, 4
    for ranks in range(2, 9):
        # A rank dies in the second step after between_steps.
        used = sum((between_steps + 2) * batch_size * left for left in range(1, ranks + 1))
        assert used < rows_needed(ranks, batch_size, between_steps) < 2 * used
