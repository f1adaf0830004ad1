"""Tests of ``paceline train`` as typed by a user: trained, killed and resumed."""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import random
import signal
import subprocess
import sys
import termios
import time
import tomllib

import pytest

from tests import devices
from tests.end_to_end.zipf_text import last_step, small_run
from tests.processes import call_paceline, children_of, start_python, until

_SMALL = (*small_run(steps=40, save_every=5), "--set", "logging.every_steps=1")
_SMALL += ("--set", f"parallel.device={devices.of_commands()}")


def _start(place: pathlib.Path, *arguments: str) -> "subprocess.Popen[str]":
    return start_python(place, "paceline", *arguments)


def _paceline(place: pathlib.Path, *arguments: str) -> str:
    process = _start(place, *arguments)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return stdout


def _here(place: pathlib.Path, *arguments: str) -> str:
    """Does as `_paceline`, in this process."""
    result = call_paceline(place, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _losses(place: pathlib.Path, out: str) -> list[float]:
    lines = (place / out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "step"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    tmp_path = tmp_path_factory.mktemp("train")
    text = "All this happened, more or less. " * 40
    (tmp_path / "corpus").mkdir()
    for number in range(60):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number}: {text}")
    prepared = ("data", "prepare", "corpus", "--tokenizer", "bytes", "--out", "tokens")
    _here(tmp_path, *prepared, "--heldout", "0.2")
    (tmp_path / "run.toml").write_text(_here(tmp_path, "train", "init"))
    return tmp_path


def test_a_run_that_is_killed_goes_on_to_the_bit(place: pathlib.Path) -> None:
    command = ("train", "run.toml", "--ranks", "2", *_SMALL)
    assert "parameters" in _here(place, *command, "--dry-run")
    whole = _paceline(place, *command, "--set", "out=whole")
    assert whole.startswith("finished after step 40, loss ")

    killed = _start(place, *command)
    deadline = time.monotonic() + 120
    while not (place / "run" / "checkpoints" / "step-00000010").exists():
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert len(_losses(place, "run")) < 40

    assert _paceline(place, *command) == whole.replace("whole", "run")
    assert _losses(place, "run") == _losses(place, "whole")
    audited = _here(place, "data", "audit", "run")
    assert audited == "run: 40 steps, every sample exactly once\n"


@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_what_could_not_be_saved_does_not_start(
    place: pathlib.Path, flags: tuple[str, ...]
) -> None:
    command = ("train", "run.toml", "--ranks", "2", *_SMALL, "--set", "out=not-started", *flags)
    refused = call_paceline(place, *command, "--set", "parallel.strategy=torch_zero")
    assert refused.returncode == 2
    assert not refused.stdout
    (line,) = refused.stderr.splitlines()
    assert "parallel.strategy torch_zero" in line
    assert "use zero1" in line
    assert not (place / "not-started").exists()


@pytest.mark.slow
def test_a_searched_plan_is_trained(place: pathlib.Path) -> None:
    searched = _paceline(
        place,
        *(
            "plan",
            "search",
            "--runnable",
            "--model",
            "bytes-6M",
            "--devices",
            "2",
            "--context",
            "32",
        ),
        *("--batch-tokens", "256", "--precision", "float32", "--no-advice", "--json"),
        *("--out", "searched"),
    )
    best = [json.loads(line) for line in searched.splitlines()][1]["choice"]
    quick = (
        "--set",
        "training.steps=2",
        "--set",
        "schedule.warmup_steps=1",
        "--set",
        "out=planned",
    )
    run = _paceline(place, "train", "run.toml", "--plan", "searched/plan.json", *quick)
    assert run.startswith("finished after step 2, loss ")
    config = tomllib.loads((place / "planned" / "config.toml").read_text())
    assert config["training"]["batch_size"] == 8
    assert config["training"]["micro_batch_size"] == best["batch"]["num_sequences"]
    recomputed = best["layout"]["activation_checkpointing"]
    assert config["model"]["activation_checkpointing"] == recomputed


def _parameters(out: pathlib.Path) -> dict[str, bytes]:
    newest = max((out / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_of_one_rank_change_nothing(place: pathlib.Path) -> None:
    command = ("train", "run.toml", "--ranks", "2", *_SMALL, "--set", "training.steps=200")
    _paceline(place, *command, "--set", "out=never-killed")
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    out = place / "often-killed"
    checkpoints = out / "checkpoints"
    num_kills = num_in_saves = 0
    for _ in range(60):
        running = _start(place, *command, "--set", "out=often-killed")
        # Most runs get past the next checkpoint; some are killed while a save is half-written.
        target = last_step(out) + chance.randint(1, 12)
        wants_save = chance.random() < 0.4
        while running.poll() is None and num_kills < 20:
            is_saving = any(checkpoints.glob("*.tmp*"))
            if last_step(out) >= target and (is_saving or not wants_save):
                ranks = children_of(running.pid)
                if ranks:
                    os.kill(chance.choice(ranks), signal.SIGKILL)
                    num_kills += 1
                    num_in_saves += is_saving
                break
            time.sleep(0.001)
        _, stderr = running.communicate(timeout=240)
        if running.returncode == 0:
            break
    assert num_kills == 20, f"seed {seed}: {stderr}"
    assert num_in_saves >= 2, f"seed {seed}"
    assert running.returncode == 0, f"seed {seed}: {stderr}"
    assert _losses(place, "often-killed") == _losses(place, "never-killed"), f"seed {seed}"
    assert _parameters(out) == _parameters(place / "never-killed"), f"seed {seed}"


def _until_it_trains(place: pathlib.Path, *changes: str) -> "subprocess.Popen[str]":
    endless = ("--ranks", "2", *_SMALL, "--set", "training.steps=100000", *changes)
    running = _start(place, "train", "run.toml", *endless)
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("step 2 "):
            break
    return running


def test_a_run_that_is_asked_to_stop_saves_and_says_so(place: pathlib.Path) -> None:
    running = _until_it_trains(place, "--set", "out=long", "--set", "checkpoint.every_steps=99999")
    running.send_signal(signal.SIGUSR1)
    stdout, stderr = running.communicate(timeout=120)
    assert running.returncode == 143, stderr
    assert stdout.startswith("stopped after step ")
    assert "failed" not in stderr
    assert list((place / "long" / "checkpoints").glob("step-*"))


def _take_terminal() -> None:
    """Makes stdin the controlling terminal, whose end is noticed even below nohup."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_whose_terminal_is_closed_is_saved(place: pathlib.Path, ranks: str) -> None:
    out = f"closed-{ranks}"
    words = ["train", "run.toml", "--ranks", ranks, *_SMALL, "--set", f"out={out}"]
    words += ["--set", "training.steps=100000", "--set", "checkpoint.every_steps=99999"]
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words, "--set", "logging.every_steps=100"],
        cwd=place,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    os.set_blocking(ours, False)

    def trains() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 1 << 16)  # Otherwise the run waits for its terminal.
        return last_step(place / out) > 5

    try:
        until(trains)
        os.close(ours)
        assert running.wait(120) == 129
    finally:
        running.kill()
    assert list((place / out / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_signals_to_all_processes_are_one_request(place: pathlib.Path) -> None:
    running = _until_it_trains(place, "--set", "out=all", "--set", "checkpoint.every_steps=99999")
    os.killpg(running.pid, signal.SIGTERM)
    stdout, stderr = running.communicate(timeout=120)
    assert running.returncode == 143, stderr
    assert stdout.startswith("stopped after step ")
    assert list((place / "all" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_second_signal_ends_a_run_that_cannot_save(place: pathlib.Path) -> None:
    running = _until_it_trains(place, "--set", "out=stuck", "--set", "checkpoint.every_steps=99999")
    first, second = children_of(running.pid)
    os.kill(second, signal.SIGSTOP)  # The other rank waits for it.
    time.sleep(0.5)
    running.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    time.sleep(1)
    os.kill(second, signal.SIGCONT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 143
    assert "not saved: a second SIGTERM" in stderr
    assert not pathlib.Path(f"/proc/{first}").exists()
    assert not list((place / "stuck" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_supervised_run_survives_kills_to_the_bit(place: pathlib.Path) -> None:
    command = ("train", "run.toml", "--ranks", "2", *_SMALL, "--set", "training.steps=150")
    _paceline(place, *command, "--set", "out=unsupervised")
    out = place / "supervised"
    running = _start(place, *command, "--set", "out=supervised", "--supervise")
    for victim, step in ((0, 12), (1, 51), (0, 93)):
        while last_step(out) < step:
            assert running.poll() is None, running.communicate()
            time.sleep(0.002)
        os.kill(children_of(running.pid)[victim], signal.SIGKILL)
        while last_step(out) >= step:
            assert running.poll() is None, running.communicate()
            time.sleep(0.002)
    stdout, stderr = running.communicate(timeout=240)
    assert running.returncode == 0, stderr
    assert stdout.startswith("finished after step 150")
    assert _losses(place, "supervised") == _losses(place, "unsupervised")
    assert _parameters(out) == _parameters(place / "unsupervised")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    restarts = [row for row in rows if row.get("name") == "restarted"]
    assert [row["details"]["restart"] for row in restarts] == [1, 2, 3]
    assert [row["details"]["rank"] for row in restarts] == [0, 1, 0]
    for row in restarts:
        parts = ("wait_s", "rendezvous_s", "load_s", "first_step_s")
        assert row["time_s"] == pytest.approx(sum(row["details"][part] for part in parts), abs=0.1)
    audited = _paceline(place, "data", "audit", "supervised")
    assert audited == "supervised: 150 steps, every sample exactly once\n"


@pytest.mark.slow
def test_a_supervised_run_that_diverges_is_not_restarted(place: pathlib.Path) -> None:
    diverging = ("--set", "optimizer.learning_rate=1e30", "--set", "out=diverging-again")
    running = _start(place, "train", "run.toml", "--ranks", "2", "--supervise", *_SMALL, *diverging)
    _, stderr = running.communicate(timeout=240)
    assert running.returncode == 1
    assert len([line for line in stderr.splitlines() if line.startswith("paceline: error")]) == 1
    assert "a restart would not help" in stderr


@pytest.mark.slow
def test_a_run_that_diverges_says_so_once(place: pathlib.Path) -> None:
    diverging = ("--set", "optimizer.learning_rate=1e30", "--set", "out=diverging")
    running = _start(place, "train", "run.toml", "--ranks", "2", *_SMALL, *diverging)
    _, stderr = running.communicate(timeout=240)
    assert running.returncode == 1
    (error,) = [line for line in stderr.splitlines() if line.startswith("paceline: error")]
    assert "is the first that is not finite" in error
    assert (place / "diverging" / "diverged").is_dir()


def test_what_is_missing_is_said_in_one_line(place: pathlib.Path) -> None:
    missing = _start(place, "train", "run.toml", "--set", 'data.sources=[{ place = "absent" }]')
    _, stderr = missing.communicate(timeout=120)
    assert missing.returncode == 1
    assert stderr.count("\n") == 1
    assert "absent: no manifest.json" in stderr


@pytest.mark.slow
def test_a_terminal_shows_a_panel_of_several_ranks(place: pathlib.Path) -> None:
    terminal, own_end = pty.openpty()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "paceline", "train", "run.toml", "--ranks", "2", *_SMALL),
            *("--set", "out=shown"),
        ],
        cwd=place,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=own_end,
        text=True,
    )
    os.close(own_end)
    shown = b""
    with contextlib.suppress(OSError):  # Raised at the end of a terminal on Linux.
        while part := os.read(terminal, 65536):
            shown += part
    os.close(terminal)
    stdout, _ = process.communicate(timeout=120)
    assert stdout.startswith("finished after step 40")
    last = shown.decode().rpartition("shown: step 40 of 40")[2]
    for text in ("held-out", "tokens/s", "exposed communication", "tensors predicted", "finished"):
        assert text in last
