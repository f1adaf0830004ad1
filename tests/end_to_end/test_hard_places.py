"""Commands where little works: no shared memory, no stdout, an interruption, a busy store."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from paceline.training.run_directory import audit_run
from tests.end_to_end.zipf_text import prepare_text, small_run
from tests.processes import children_of, is_running, paceline, start_python, until
from tests.unit.data.corpus import dataset_bytes, write_corpus

_SMALL = small_run(steps=20, save_every=10)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a directory with tokens and a config."""
    place = tmp_path_factory.mktemp("hard")
    prepare_text(place, "run.toml")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("options", ["ro", "size=64k"])
def test_two_ranks_train_without_shared_memory(
    place: pathlib.Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    mount = f"mount -t tmpfs -o {options} none /dev/shm"
    unshare = ("unshare", "--mount", "--map-root-user", "sh", "-c")
    if subprocess.run([*unshare, mount], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("mounting needs user namespaces")
    out = f"without-{options}"
    words = [sys.executable, "-m", "paceline", "train", "run.toml", "--ranks", "2", *_SMALL]
    words += ["--set", "checkpoint.memory_every_steps=5", "--set", f"out={out}"]
    ended = subprocess.run(
        [*unshare, f'{mount} && exec "$@"', "sh", *words], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert audit_run(pathlib.Path(out)) == (20, [])


def test_a_run_needs_no_stdout(place: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = [sys.executable, "-m", "paceline", "train", "run.toml", *_SMALL]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *words, "--set", "out=closed"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert audit_run(pathlib.Path("closed")) == (20, [])


def test_an_interrupted_preparation_ends_with_its_workers_and_goes_on(
    tmp_path: pathlib.Path,
) -> None:
    write_corpus(tmp_path / "corpus", per_file=6000)
    words = ("data", "prepare", "corpus", "--tokenizer", "bytes", "--workers", "2", "--out")
    whole = paceline(tmp_path, *words, "whole")
    assert whole.returncode == 0, whole.stderr
    for _ in range(5):  # On a busy machine, all may be prepared before the signal arrives.
        shutil.rmtree(tmp_path / "interrupted", ignore_errors=True)
        code, stderr, workers = _interrupt_preparation(tmp_path, *words, "interrupted")
        if code != 0:
            break
    assert code == 130, stderr
    assert "Traceback" not in stderr
    until(lambda: not any(map(is_running, workers)), 30)
    again = paceline(tmp_path, *words, "interrupted")
    assert again.returncode == 0, again.stderr
    assert dataset_bytes(tmp_path / "interrupted") == dataset_bytes(tmp_path / "whole")


def _interrupt_preparation(tmp_path: pathlib.Path, *words: str) -> tuple[int, str, list[int]]:
    """Interrupts a preparation that has written a shard; returns its end, and its workers."""
    with start_python(tmp_path, "paceline", *words) as first:
        until(lambda: any((tmp_path / words[-1]).rglob("*.tokens")) or first.poll() is not None)
        workers = children_of(first.pid)
        if first.poll() is None:  # As a terminal does: every process of the group.
            os.killpg(first.pid, signal.SIGINT)
        _, stderr = first.communicate(timeout=60)
    return first.returncode, stderr, workers


def test_benchmarks_add_to_one_store(tmp_path: pathlib.Path) -> None:
    words = ("bench", "step", "--d-model", "16", "--num-heads", "2", "--num-layers", "1")
    words += ("--d-ff", "32", "--vocab-size", "64", "--batch", "2", "--device", "cpu")
    words += ("--warmup", "1", "--steps", "2", "--phase", "train", "--json", "--context")
    runs = [start_python(tmp_path, "paceline", *words, length) for length in ("16", "32", "48")]
    printed = []
    for run in runs:
        stdout, stderr = run.communicate(timeout=240)
        assert run.returncode == 0, stderr
        printed += stdout.splitlines()
    assert len(printed) == 3
    stored = (tmp_path / "paceline-records.jsonl").read_text().splitlines()
    assert sorted(stored) == sorted(printed)
