"""Tests of which failures lead to a restart, and after which pause."""

import pytest

from paceline.core.errors import UsageError
from paceline.parallel.ranks.supervisor import Failure, RestartPolicy


def _failure(step: int, exit_code: int = 137, **changes: object) -> Failure:
    return Failure(rank=1, exit_code=exit_code, phase="forward", step=step, **changes)


def test_a_run_that_makes_progress_is_restarted_at_once() -> None:
    policy = RestartPolicy(60)
    for number in range(1, 61):
        verdict = policy.judge(_failure(step=number * 10))
        assert verdict.restart
        assert verdict.pause_s == 0
        assert verdict.why == f"restart {number} of at most 60"
    verdict = policy.judge(_failure(step=900))
    assert not verdict.restart
    assert verdict.why == "given up after 60 restarts"


def test_one_step_that_fails_again_and_again_ends_the_run() -> None:
    policy = RestartPolicy(60)
    assert policy.judge(_failure(step=7)).pause_s == 0
    assert policy.judge(_failure(step=7)).pause_s == 1
    verdict = policy.judge(_failure(step=7))
    assert not verdict.restart
    assert verdict.why == "failed 3 times in a row before step 8 was done"


def test_progress_between_failures_begins_the_count_anew() -> None:
    policy = RestartPolicy(60)
    assert all(policy.judge(_failure(step=step)).restart for step in (7, 7, 8, 7, 7, 9, 9))


def test_what_fails_before_its_first_step_is_given_up_as_well() -> None:
    policy = RestartPolicy(60)
    verdicts = [policy.judge(_failure(step=0)) for _ in range(3)]
    assert [verdict.restart for verdict in verdicts] == [True, True, False]
    assert verdicts[-1].why == "failed 3 times in a row before its first step was done"


@pytest.mark.parametrize("failure", [_failure(3, 1, is_final=True), _failure(3, 2)])
def test_what_would_end_in_the_same_way_is_not_restarted(failure: Failure) -> None:
    assert not RestartPolicy(60).judge(failure).restart


def test_a_failure_says_who_when_and_how() -> None:
    assert str(_failure(1234)) == "rank 1 ended with exit code 137, in forward after step 1,234"
    assert str(_failure(0, 1)) == "rank 1 ended with exit code 1, in forward"
    hung = "rank 1 sent no heartbeat for 61 s, in forward after step 3"
    assert str(_failure(3, hung_s=61.2)) == hung


def test_a_negative_number_of_restarts_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-restarts -1"):
        RestartPolicy(-1)
