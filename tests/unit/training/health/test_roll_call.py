"""Tests of blame: ranks that do not answer, or if all do, ranks that are behind."""

from paceline.training.health.hang import LastCollective, Presence, blame


def presence(rank: int, step: int, phase: str = "the step", number: int = 7) -> Presence:
    collective = LastCollective(number=number, text="all_reduce of 12 elements (Float)")
    return Presence(rank=rank, step=step, phase=phase, waited_s=4.0, collective=collective)


def test_who_is_silent_is_named_with_what_the_others_wait_for() -> None:
    said = blame([presence(0, 5), None, presence(2, 5)], 3.0)
    assert said.startswith(
        "rank 1 has not answered within 3 s: stopped, or gone; rank 0 after step 5"
    )
    assert "all_reduce of 12 elements" in said
    assert blame([presence(0, 5), None, None], 3.0).startswith("ranks 1, 2 have not answered")


def test_who_is_behind_is_named() -> None:
    said = blame([presence(0, 5, number=9), presence(1, 5, "data", 7)], 3.0)
    assert said.startswith("rank 1 after step 5, in data for 4 s")
    assert "others wait for it: rank 0" in said


def test_nobody_is_blamed_where_all_are_in_one_place() -> None:
    assert "suspect the link" in blame([presence(0, 5), presence(1, 5)], 3.0)
