"""A directory belongs to one command: the second ends with 2 and one line, and damages nothing."""

import json
import os
import pathlib
import random
import signal

import pytest

from paceline.core.lock import LOCK, owned
from paceline.records import RecordStore
from paceline.training.run_directory import audit_run
from tests.end_to_end.zipf_text import prepare_text, small_run
from tests.processes import call_paceline, children_of, paceline, start_python, until

_SMALL = small_run(steps=150, save_every=20)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a directory with tokens and a config."""
    place = tmp_path_factory.mktemp("ownership")
    prepare_text(place, "run.toml")
    return place


def _suspend(pid: int) -> None:
    for child in children_of(pid):
        _suspend(child)
    os.kill(pid, signal.SIGSTOP)


def _steps(run: pathlib.Path) -> list[int]:
    if not (run / "metrics.jsonl").exists():
        return []
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if row["kind"] == "step"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("paceline", "train", "run.toml"), id="alone"),
        pytest.param(
            ("paceline", "train", "run.toml", "--ranks", "2"), id="ranks", marks=pytest.mark.slow
        ),
        pytest.param(
            ("paceline", "train", "run.toml", "--ranks", "2", "--supervise"), id="supervised"
        ),
        pytest.param(
            (
                *("torch.distributed.run", "--nproc-per-node", "2"),
                *("-m", "paceline", "train", "run.toml"),
            ),
            id="torchrun",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_second_train_is_refused_and_after_kill_9_the_next_goes_on(
    place: pathlib.Path,
    words: tuple[str, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    out = request.node.callspec.id
    run = place / out
    command = (*words, *_SMALL, "--set", f"out={out}")
    with start_python(place, *command) as first:
        until(lambda: len(_steps(run)) > 20)
        _suspend(first.pid)  # A run that waits owns its directory, too.
        second = call_paceline(place, "train", "run.toml", *_SMALL, "--set", f"out={out}")
        assert first.poll() is None, first.communicate()
        assert second.returncode == 2
        assert second.stderr.startswith(f"paceline: error: {out} is in use (paceline train, ")
        assert len(second.stderr.splitlines()) == 1
        # torchrun's ranks die with their agent.
        first.kill()
    went_on = paceline(place, "train", "run.toml", *_SMALL, "--set", f"out={out}")
    assert went_on.returncode == 0, went_on.stderr
    assert _steps(run) == list(range(1, 151))
    assert audit_run(run) == (150, [])


@pytest.mark.slow
def test_ranks_of_a_launcher_that_come_second_are_refused(place: pathlib.Path) -> None:
    words = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "paceline", "train")
    with owned(place / "taken", "paceline train"):
        with start_python(place, *words, "run.toml", *_SMALL, "--set", "out=taken") as second:
            _, stderr = second.communicate(timeout=240)
        assert stderr.count("taken is in use (paceline train, ") == 1
        assert "exitcode  : 2" in stderr.replace("\t", " ")
    assert [path.name for path in (place / "taken").iterdir()] == [LOCK]


def test_a_second_preparation_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "text.txt").write_text("words\n" * 1000)
    command = ("data", "prepare", "text.txt", "--tokenizer", "bytes", "--out", "tokens")
    with owned(tmp_path / "tokens", "paceline data prepare"):
        second = paceline(tmp_path, *command)
    assert second.returncode == 2
    assert "tokens is in use (paceline data prepare, " in second.stderr
    assert paceline(tmp_path, *command).returncode == 0
    # A dataset that is there can be asked for while another command holds it.
    with owned(tmp_path / "tokens", "paceline data prepare"):
        assert paceline(tmp_path, *command).returncode == 0


def test_a_second_sweep_and_a_second_loop_are_refused(place: pathlib.Path) -> None:
    for verb, size in (("sweep", "--target"), ("loop", "--budget")):
        with owned(place / verb, f"paceline {verb}"):
            second = paceline(place, verb, "run.toml", size, "1e14", "--out", verb)
        assert second.returncode == 2
        assert f"{verb} is in use (paceline {verb}, " in second.stderr
        assert [path.name for path in (place / verb).iterdir()] == [LOCK]


def test_a_sweep_does_not_take_a_run_of_somebody_else_for_a_failed_one(place: pathlib.Path) -> None:
    """Whoever trains in the directory of a run by hand stops the sweep, and spoils nothing."""
    sweep = ("sweep", "run.toml", "--target", "8e12", "--at-once", "1", "--out", "by-hand")
    with start_python(place, "paceline", *sweep) as first:
        until(lambda: any((place / "by-hand" / "runs").glob("*/metrics.jsonl")))
        [child] = [pid for pid in children_of(first.pid) if _is_train(pid)]
        run = pathlib.Path(f"/proc/{child}/fd/1").readlink().parent
        first.kill()
    with owned(run, "paceline train"):
        second = paceline(place, *sweep)
    assert second.returncode == 2
    assert f"{run.name} is in use (paceline train, " in second.stderr
    assert not (run / "ended.json").exists()


def _is_train(pid: int) -> bool:
    return b"\0train\0" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()


def test_interleaved_commands_lose_double_and_mislabel_nothing(tmp_path: pathlib.Path) -> None:
    """A few of the interleavings of results/ownership.jsonl, other ones each time."""
    words = ("studies.reliability.ownership", str(tmp_path / "store.jsonl"))
    seed = str(random.randrange(10**6))
    root = pathlib.Path(__file__).parents[2]
    with start_python(root, *words, "--interleavings", "6", "--seed", seed) as study:
        stdout, stderr = study.communicate(timeout=280)
    assert study.returncode == 0, f"seed {seed}: {stdout}{stderr}"
    tried = [record.metrics["num_tried"].value for record in RecordStore(words[1]).read()]
    assert len(tried) == 5
    assert sum(tried) >= 5


def test_a_stop_request_frees_the_directory(place: pathlib.Path) -> None:
    command = ("train", "run.toml", *_SMALL, "--set", "out=stopped")
    with start_python(place, "paceline", *command) as first:
        until(lambda: len(_steps(place / "stopped")) > 20)
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
    assert first.returncode == 143
    assert (place / "stopped" / LOCK).read_bytes() == b""
