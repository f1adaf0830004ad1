"""Tests that preparations killed at any moment give the same bytes, and hostile files errors."""

import gzip
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from paceline.data.prepare import tokenize
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.run import prepare
from paceline.data.tokenizer import train_bpe
from tests.processes import children_of, is_running
from tests.unit.data.corpus import config_of, dataset_bytes, make_documents, write_corpus

PIECE_BYTES = 6000
DRIVER = """
import sys
from paceline.data.prepare import tokenize
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.run import prepare

tokenize.SMALLEST_PIECE_BYTES = int(sys.argv[1])
source, tokenizer, out, workers = sys.argv[2:]
config = PrepareConfig(
    sources=(source,), tokenizer=tokenizer, out=out, heldout=0.1, shard_tokens=5000,
    workers=int(workers),
)
prepare(config)
"""
FEW, MANY = 2, pytest.param(20, marks=pytest.mark.slow)


@pytest.fixture
def config(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    monkeypatch.setattr(tokenize, "SMALLEST_PIECE_BYTES", PIECE_BYTES)
    write_corpus(tmp_path / "corpus", per_file=700)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(train_bpe(make_documents(100), 300))
    return config_of(tmp_path / "corpus", tmp_path / "whole", tokenizer=str(tokenizer))


def _start(config: PrepareConfig, out: pathlib.Path, workers: int) -> subprocess.Popen[bytes]:
    arguments = [str(PIECE_BYTES), config.sources[0], config.tokenizer, str(out), str(workers)]
    return subprocess.Popen([sys.executable, "-c", DRIVER, *arguments])


def _num_files(out: pathlib.Path) -> int:
    # Directories may vanish meanwhile, which os.walk ignores.
    return sum(len(files) for _, _, files in os.walk(out))


def _num_files_of_a_whole_run(config: PrepareConfig, out: pathlib.Path) -> int:
    """Prepares without a kill, and returns the peak number of files, finished or not."""
    driver = _start(config, out, workers=2)
    most = 0
    while driver.poll() is None:
        most = max(most, _num_files(out))
        time.sleep(0.002)
    assert driver.returncode == 0
    return most


def _wait_for_files(driver: subprocess.Popen[bytes], out: pathlib.Path, number: int) -> None:
    """Waits until a preparation has written `number` files, or has ended."""
    while driver.poll() is None and _num_files(out) < number:
        time.sleep(0.002)


@pytest.mark.parametrize("num_kills", [FEW, MANY])
def test_a_driver_that_is_killed_is_started_again(
    config: PrepareConfig, tmp_path: pathlib.Path, num_kills: int
) -> None:
    most = _num_files_of_a_whole_run(config, tmp_path / "whole")
    expected = dataset_bytes(tmp_path / "whole")
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    num_interrupted = 0
    for number in range(num_kills):
        out = tmp_path / f"killed{number}"
        driver = _start(config, out, workers=2)
        _wait_for_files(driver, out, chance.randint(1, most - 2))
        workers = children_of(driver.pid)
        driver.kill()
        driver.wait()
        num_interrupted += not (out / "manifest.json").exists()
        deadline = time.monotonic() + 30
        while any(map(is_running, workers)):
            assert time.monotonic() < deadline, "workers outlive their driver"
            time.sleep(0.01)
        prepare(config_of(tmp_path / "corpus", out, tokenizer=config.tokenizer))
        assert dataset_bytes(out) == expected, f"seed {seed}"
    assert num_interrupted >= num_kills // 2


@pytest.mark.parametrize("num_kills", [FEW, MANY])
def test_a_worker_that_is_killed_changes_nothing(
    config: PrepareConfig, tmp_path: pathlib.Path, num_kills: int
) -> None:
    most = _num_files_of_a_whole_run(config, tmp_path / "whole")
    expected = dataset_bytes(tmp_path / "whole")
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    num_killed = 0
    for number in range(num_kills):
        out = tmp_path / f"killed{number}"
        driver = _start(config, out, workers=2)
        _wait_for_files(driver, out, chance.randint(2, most - 2))
        workers = children_of(driver.pid)
        if workers:
            os.kill(chance.choice(workers), signal.SIGKILL)
            num_killed += 1
        assert driver.wait() == 0
        assert dataset_bytes(out) == expected, f"seed {seed}"
    assert num_killed >= num_kills // 2


HOSTILE = """
import resource, sys
from paceline.core.errors import DataError
from paceline.data.prepare.config import PrepareConfig
from paceline.data.prepare.run import prepare
from paceline.data import source_files

source, tokenizer, out, harmless = sys.argv[1:]
source_files.HARMLESS_BYTES = int(harmless)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    manifest = prepare(PrepareConfig(sources=(source,), tokenizer=tokenizer, out=out, workers=1))
    print({reason: each.num_documents for reason, each in manifest.dropped.items()})
    print(manifest.splits["train"].num_documents + manifest.splits["heldout"].num_documents)
except DataError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def _prepare_hostile(
    source: pathlib.Path, tokenizer: pathlib.Path, harmless_bytes: int = 2**30
) -> tuple[list[str], float]:
    """Prepares in a subprocess; returns its output lines and its peak memory growth in MiB."""
    out = source.with_name("out")
    result = subprocess.run(
        [sys.executable, "-c", HOSTILE, source, tokenizer, out, str(harmless_bytes)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *said, peak_kib = result.stdout.splitlines()
    return said, int(peak_kib) / 1024


@pytest.fixture
def tokenizer(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(make_documents(100), 300))
    return path


@pytest.mark.parametrize("num_mb", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_line_without_end_is_left_out_in_bounded_memory(
    tmp_path: pathlib.Path, tokenizer: pathlib.Path, num_mb: int
) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(num_mb):
            file.write(b"x y " * 250_000)
        file.write(b'"}\n{"text": "last"}\n')
    said, peak_mib = _prepare_hostile(path, tokenizer)
    assert said == ["{'too long': 1}", "2"]
    assert peak_mib < 75


@pytest.mark.parametrize("num_mib", [64, pytest.param(1200, marks=pytest.mark.slow)])
def test_a_bomb_is_refused_in_bounded_memory(
    tmp_path: pathlib.Path, tokenizer: pathlib.Path, num_mib: int
) -> None:
    path = tmp_path / "a.txt.gz"
    with gzip.open(path, "wb", compresslevel=6) as file:
        for _ in range(num_mib):
            file.write(bytes(2**20))
    harmless = 2**30 if num_mib > 1024 else 2**25
    (said,), peak_mib = _prepare_hostile(path, tokenizer, harmless)
    assert "a.txt.gz" in said
    assert "over 200 times" in said
    assert peak_mib < 75


@pytest.mark.parametrize("number", [10**5, pytest.param(10**6, marks=pytest.mark.slow)])
def test_tiny_documents_do_not_add_up(
    tmp_path: pathlib.Path, tokenizer: pathlib.Path, number: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"text": str(each % (number - 1))}) + "\n" for each in range(number))
    )
    said, peak_mib = _prepare_hostile(path, tokenizer)
    assert said == ["{'duplicate': 1}", str(number - 1)]
    assert peak_mib < 250
