"""Tests of every verb through its real entry point; commands that succeed run in subprocesses."""

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

from paceline.cli.main import main
from paceline.cli.output import case_progress, work_progress
from tests import devices
from tests.processes import call_paceline

PACELINE = str(pathlib.Path(sys.executable).with_name("paceline"))
TINY = ["--num-layers", "1", "--d-model", "32", "--d-ff", "64", "--num-heads", "2"]
LINK = ["--size", "1GB", "--bandwidth", "1GB/s"]
FAST = [*TINY, "--vocab-size", "64", "--context", "16", "--batch", "2"]
FAST += ["--device", devices.of_commands()]


def paceline(
    *arguments: str, cwd: pathlib.Path, expected_exit_code: int = 0
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [PACELINE, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert result.returncode == expected_exit_code, result.stderr + result.stdout
    return result


@pytest.mark.slow
def test_help_is_quick(tmp_path: pathlib.Path) -> None:
    def cpu_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def seconds_of_help() -> float:
        before = cpu_seconds()
        result = paceline("--help", cwd=tmp_path)
        assert all(verb in result.stdout for verb in ("bench", "report", "env"))
        return cpu_seconds() - before

    # 0.26 s on an idle machine; importing torch takes 1.5 s more.
    # The minimum leaves out the first start, which compiles bytecode.
    assert min(seconds_of_help() for _ in range(4)) < 0.5


def test_help_names_values_and_hides_the_parser(tmp_path: pathlib.Path) -> None:
    ddp = paceline("bench", "ddp", "--help", cwd=tmp_path).stdout
    assert "llama3-8B" in ddp
    assert "None}" not in ddp
    assert "sweep" not in ddp
    assert "append" in ddp
    assert "read the records" in paceline("report", "table", "--help", cwd=tmp_path).stdout
    assert "--version" in paceline("--help", cwd=tmp_path).stdout


def test_a_first_rank_without_a_terminal_tells_its_progress_in_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(rank: str) -> list[str]:
        monkeypatch.setenv("RANK", rank)
        with case_progress(2) as progress:
            progress.step(1, 25)
            progress.step(2, 25)
            progress.next_case()
            monkeypatch.setattr("paceline.cli.output._PLAIN_PAUSE_S", 0.0)
            progress.step(3, 25)
        return capsys.readouterr().err.splitlines()

    # Lines are rate-limited.
    assert told("0") == [
        "paceline: 0 of 2 cases done, step 1 of 25, 0 s, about 0 s left",
        "paceline: 1 of 2 cases done, step 3 of 25, 0 s, about 0 s left",
    ]
    assert told("1") == []


@pytest.mark.parametrize(("total", "shown"), [(None, []), (4, ["1/4"])])
def test_work_is_shown_with_its_time_on_a_terminal_alone(
    total: int | None,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told() -> str:
        with work_progress("searching", total) as done:
            done()
        return capsys.readouterr().err

    assert told() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    for part in ("searching", "0:00:00", *shown):
        assert part in told()


def test_version_and_module_entry_point(tmp_path: pathlib.Path) -> None:
    assert paceline("--version", cwd=tmp_path).stdout.startswith("paceline 0.")
    module = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, check=True
    )
    assert module.stdout.startswith("paceline 0.")


def _planned(place: pathlib.Path, *arguments: str) -> list[str]:
    """Plans in this process, and returns the printed lines."""
    result = call_paceline(place, "plan", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_plan_shows_its_working(tmp_path: pathlib.Path) -> None:
    text = paceline("plan", "account", cwd=tmp_path).stdout
    assert "3,517.6 GB = 3,276 GiB" in text
    assert "B > 25,302 tokens, 395 per device" in text
    lines = _planned(tmp_path, "account", "--json")
    assert [json.loads(line)["question"][:3] for line in lines] == ["(a)", "(b)", "(c)", "(d)"]
    memory = ["--model", "large", "--strategy", "zero2", "--device", "h100-sxm"]
    (line,) = _planned(tmp_path, "memory", *memory, "--json")
    verdict, *_ = _planned(tmp_path, "memory", "--num-layers", "2", "--device", "rtx-3090")
    assert re.match(r"fits: \d\.\d of 22\.4 GiB \(NVIDIA GeForce RTX 3090", verdict)
    assert json.loads(line)["values"]["fewest_ranks"] == 1
    overhead = ["--size", "100MB", "--bandwidth", "1GB/s", "--latency", "1ms"]
    (line,) = _planned(tmp_path, "overhead", *overhead, "--json")
    assert json.loads(line)["values"]["overhead_s"] == pytest.approx(0.02)
    assert set(json.loads(line)["steps"][0]) == {"formula", "numbers", "result"}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "complaint"),
    [
        (["bench", "step", "--model", "smal"], 2, "did you mean 'small'"),
        (["bench", "step", "--model", "small", "--context", "9999"], 2, "--context 9999"),
        (["bench", "step", "--model"], 2, "nothing to measure"),
        (["bench", "step", "--steps", "0"], 2, "--steps"),
        (["bench", "step", "--frobnicate"], 2, "frobnicate"),
        (["bench"], 2, "step"),
        (["report", "table", "--store", "none.jsonl"], 1, "none.jsonl: cannot read"),
        (["report", "plot", "--store", "empty.jsonl", "--out", "x"], 2, "nothing to draw"),
        (["report", "table", "--store", "damaged.jsonl"], 1, "damaged.jsonl:2: not a valid record"),
        (["report", "table", "--store", "empty.jsonl"], 2, "no records"),
        (["report", "table", "--store", "empty.jsonl", "--kind", "stepp"], 2, "--kind stepp"),
        (["bench", "step", "--model", "xxl"], 2, "can be accounted for but not run"),
        (["bench", "comm", "--sizes", "10"], 2, "write it like 10MB"),
        (["lab", "run", "--rate", "fast", "--", "true"], 2, "write it like 2gbit"),
        (["plan", "account", "--model", "small"], 2, "such as xxl"),
        (["plan", "memory", "--device", "h100"], 2, "unknown hardware 'h100'"),
        (["plan", "memory", "--device", "h200"], 2, "did you mean 'h200-sxm'?"),
        (["plan", "memory", "--strategy", "zero-2"], 2, "did you mean 'zero2'?"),
        (["bench", "ddp", "--strategies", "zero-3"], 2, "did you mean 'fsdp' (ZeRO-3) or"),
        (["plan", "overhead", *LINK, "--latency", "0s"], 2, "--latency must be positive"),
        (["plan", "overhead", *LINK, "--latency", "1"], 2, "write it like 5ms"),
        (
            ["plan", "overhead", "--size", "1GB", "--bandwidth", "1", "--latency", "1ms"],
            2,
            "cannot read the rate '1'; write it like 2gbit, 2Gbit/s or 250MB/s",
        ),
    ],
)
def test_mistakes_get_one_line_and_a_documented_exit_code(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    exit_code: int,
    complaint: str,
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "damaged.jsonl").write_text("\n{oops}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    # In this process: two dozen subprocesses would take a minute.
    try:
        code = main(arguments)
    except SystemExit as leaving:  # Raised by the argument parser.
        code = leaving.code
    printed = capsys.readouterr()
    assert code == exit_code
    assert complaint in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    result = paceline(
        *("bench", "step", *FAST, "--warmup", "0", "--steps", "1", "--store", "records.jsonl"),
        cwd=tmp_path,
        expected_exit_code=1,
    )
    assert "records.jsonl: cannot append a record: Is a directory" in result.stderr


def test_an_interrupt_leaves_no_process(tmp_path: pathlib.Path) -> None:
    process = subprocess.Popen(
        [PACELINE, "bench", "step", *FAST, "--steps", "100000", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A background launcher may ignore SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(5)
    os.killpg(process.pid, signal.SIGINT)
    _out, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in error
    assert "Traceback" not in error
    assert _process_group_ends(process.pid, within_s=30)


def _process_group_ends(group: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: pathlib.Path) -> None:
    store = pathlib.Path(__file__).parents[2] / "results" / "layout-scale.jsonl"
    process = subprocess.Popen(
        [PACELINE, "report", "table", "--json", "--store", str(store)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    assert process.wait() == 141
    process.stderr.close()


def test_a_full_stdout_is_one_line_and_exit_code_1() -> None:
    with pathlib.Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "paceline", "plan", "memory", "--model", "small"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.returncode == 1
    assert result.stderr == "paceline: error: No space left on device; free disk space\n"


def test_an_interruption_while_the_command_line_is_imported_is_one_line() -> None:
    program = """
import sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == "tyro":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from paceline.__main__ import main
sys.exit(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", program, "train", "run.toml"], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (130, "paceline: interrupted\n")
