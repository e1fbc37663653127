from __future__ import annotations

from hvdtrain.gradients.contributions import Contributions


def test_who_had_a_part_in_all_of_a_step() -> None:
    contributions = Contributions()
    contributions.begin_step()
    contributions.add((0, 1, 2))
    contributions.add((0, 2))  # another type of gradient: rank 1 died in between
    contributions.begin_step()  # its gradients wait for those of the next
    contributions.begin_step()
    contributions.add((0, 2))
    assert contributions.take() == [{0, 2}, None, {0, 2}]
    assert contributions.take() == []


def test_what_belongs_to_no_step_is_not_kept() -> None:
    contributions = Contributions()
    contributions.add((0, 1))
    assert contributions.take() == []
