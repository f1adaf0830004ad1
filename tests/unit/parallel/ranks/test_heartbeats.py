"""Tests that other processes see a rank's heartbeats, even after the rank was killed."""

import os
import signal

from paceline.parallel.ranks import heartbeats
from paceline.parallel.ranks.heartbeats import Heartbeats, Phase, Writing


def test_what_a_killed_rank_has_said_stays() -> None:
    beats = Heartbeats.for_ranks(3)
    beats.reset()
    pid = os.fork()
    if pid == 0:
        beats.become(1)
        heartbeats.beat_step(41, 7)
        heartbeats.beat(Phase.ALL_REDUCE)
        heartbeats.beat_writing(Writing.PUBLISH)
        heartbeats.beat_final()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    last = beats[1]
    assert (last.step, last.num_steps, last.is_final) == (41, 7, True)
    assert (str(last.phase), str(last.writing)) == ("all-reduce", "publish")
    assert last.time_s > beats[0].time_s > 0
    for rank in (0, 2):
        assert (beats[rank].phase, beats[rank].step) == (Phase.START, 0)
    assert Heartbeats.of_process(os.getpid())[1] == last
    beats.reset()
    assert (beats[1].step, beats[1].is_final) == (0, False)


def test_a_number_is_never_seen_half_written() -> None:
    beats = Heartbeats.for_ranks(1)
    beats.reset()
    first = beats[0].time_s
    pid = os.fork()
    if pid == 0:
        beats.become(0)
        while True:
            heartbeats.beat(Phase.FORWARD)
    try:
        times = [beats[0].time_s for _ in range(50_000)]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert times == sorted(times)
    assert times[0] >= first
