from __future__ import annotations

from hvdtrain.gradients.ranks import Contributions


def test_ranks_that_contributed_to_all_gradients_of_a_step() -> None:
    contributions = Contributions()
    contributions.begin_step()
    contributions.add((0, 1, 2))
    contributions.add((0, 2))  # gradients of another dtype, after rank 1 died
    contributions.begin_step()  # accumulated
    contributions.begin_step()
    contributions.add((0, 2))
    assert contributions.take() == [{0, 2}, None, {0, 2}]
    assert contributions.take() == []
    contributions.add((0, 1))
    assert contributions.take() == [], "outside of a step"
