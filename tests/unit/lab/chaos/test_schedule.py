import pytest

from paceline.core import UsageError
from paceline.lab.chaos.faults import Kind, schedule
from paceline.lab.chaos.run import ChaosConfig

KINDS: dict[str, Kind] = {"kill": Kind(every_s=30.0), "stop": Kind(every_s=20.0, lasts_s=5.0)}


def test_a_seed_is_a_schedule() -> None:
    first = list(schedule(KINDS, seed=1, for_s=600))
    assert first == list(schedule(KINDS, seed=1, for_s=600))
    assert first != list(schedule(KINDS, seed=2, for_s=600))


def test_faults_are_in_time_and_about_as_many_as_asked_for() -> None:
    faults = list(schedule(KINDS, seed=3, for_s=6_000))
    assert [fault.number for fault in faults] == list(range(1, len(faults) + 1))
    times = [fault.due_s for fault in faults]
    assert times == sorted(times)
    assert max(times) < 6_000
    kills = [fault for fault in faults if fault.kind == "kill"]
    assert len(kills) == pytest.approx(200, rel=0.1)
    assert len(faults) - len(kills) == pytest.approx(300, rel=0.1)
    assert all(fault.lasts_s == KINDS[fault.kind].lasts_s for fault in faults)
    assert all(0 <= fault.choice < 1 for fault in faults)


def test_leaving_a_kind_out_does_not_move_the_others() -> None:
    both = [each.due_s for each in schedule(KINDS, seed=4, for_s=300) if each.kind == "kill"]
    alone = [each.due_s for each in schedule({"kill": KINDS["kill"]}, seed=4, for_s=300)]
    assert both == alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ()}, "after --"),
        ({"kinds": {}}, "no fault"),
        ({"kinds": {"link-down": Kind(every_s=1.0)}}, "--hosts 2"),
        ({"for_s": 0.0}, "positive"),
    ],
)
def test_what_makes_no_sense(changes: dict[str, object], message: str, tmp_path: object) -> None:
    sensible = {"command": ("true",), "run": tmp_path, "kinds": KINDS, "for_s": 1.0}
    with pytest.raises(UsageError, match=message):
        ChaosConfig(**{**sensible, **changes})  # type: ignore[arg-type]
