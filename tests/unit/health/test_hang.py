"""Tests of who is at fault for a hang: ranks that do not answer, else ranks that are behind."""

from paceline.health.hang import LastCollective, RankStatus, diagnose_hang


def status(rank: int, step: int, phase: str = "the step", number: int = 7) -> RankStatus:
    collective = LastCollective(number=number, text="all_reduce of 12 elements (Float)")
    return RankStatus(rank=rank, step=step, phase=phase, waited_s=4.0, collective=collective)


def test_who_is_silent_is_named_with_what_the_others_wait_for() -> None:
    said = diagnose_hang([status(0, 5), None, status(2, 5)], 3.0)
    assert said.startswith(
        "rank 1 has not answered within 3 s: stopped, or gone; rank 0 after step 5"
    )
    assert "all_reduce of 12 elements" in said
    assert diagnose_hang([status(0, 5), None, None], 3.0).startswith("ranks 1, 2 have not answered")


def test_who_is_behind_is_named() -> None:
    said = diagnose_hang([status(0, 5, number=9), status(1, 5, "data", 7)], 3.0)
    assert said.startswith("rank 1 after step 5, in data for 4 s")
    assert "others wait for it: rank 0" in said


def test_nobody_is_blamed_where_all_are_in_one_place() -> None:
    assert "suspect the link" in diagnose_hang([status(0, 5), status(1, 5)], 3.0)
