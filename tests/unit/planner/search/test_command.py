"""Tests of the search commands: tables, JSON Lines and written files."""

import json
import pathlib
import re

import pytest

from paceline.cli.main import main
from paceline.core import UsageError
from paceline.planner.search.cluster_options import parse_batch_tokens, parse_count, parse_days

ROWS = str(pathlib.Path(__file__).parents[4] / "examples" / "rows.jsonl")
SEARCH = ["plan", "search", "--model", "llama3-8b", "--devices", "16", "--batch-tokens", "512K"]


def test_the_table_shows_the_best_and_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEARCH, "--tokens", "1e11", "--price", "2", "--compare", "tp=8,pp=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "llama3-8B (8.03 billion parameters), 64 sequences of 8,192 tokens in a step.\n"
    )
    for text in ("of it. 12,516 layouts of", "tp 8", "Why not tp=8,pp=2?", "What would help"):
        assert text in shown
    for text in ("device-hours", "interruptions", "Cost: ", "twice the memory", "goodput"):
        assert text in shown


def test_json_lines_hold_everything(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    figure, out = tmp_path / "front.svg", tmp_path / "plan"
    flags = ["--json", "--tokens", "1e11", "--compare", "pp=2", "--top", "3"]
    assert main([*SEARCH, *flags, "--figure", str(figure), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [row["kind"] for row in rows]
    assert kinds[:4] == ["search", "layout", "layout", "layout"]
    asked = ("model", "parameters", "precision", "global_batch", "context_length")
    assert [rows[0][name] for name in asked] == ["llama3-8B", 8_030_261_248, "bfloat16", 64, 8192]
    assert {"comparison", "change"} <= set(kinds)
    assert rows[1]["choice"]["step_time_s"]["low"] < rows[1]["choice"]["step_time_s"]["value"]
    assert rows[1]["run"]["goodput"] < 1
    assert figure.read_text().startswith("<?xml")
    assert (out / "torchtitan.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SEARCH, "--compare", "tq=8"], "unknown field 'tq'; known: dp"),
        ([*SEARCH, "--context", "1000"], "give a multiple of the context length, such as"),
        ([*SEARCH, "--memory", "1GB"], "would help"),
        ([*SEARCH, "--devices", "0"], "must be at least 1"),
        ([*SEARCH, "--device", "h100"], "did you mean 'h100-sxm'"),
        ([*SEARCH, "--calibration", "nemmo"], "unknown calibration 'nemmo'; did you mean"),
        ([*SEARCH, "--calibration", "no.jsonl"], "no.jsonl: no such file"),
        (
            [*SEARCH, "--calibration", "nemo-gb200-bfloat16"],
            "nemo-gb200-bfloat16 is of gb200 with bfloat16, not of h100-sxm with bfloat16",
        ),
        ([*SEARCH, "--calibration", "nemo", "--framework", "torchtitan"], "give one of them"),
        ([*SEARCH, "--price", "2"], "--price needs the --tokens of the run; add them"),
        ([*SEARCH, "--device-interval-h", "9"], "--device-interval-h needs the --tokens of"),
        ([*SEARCH, "--context", "0"], "--context is 0; it must be at least 1"),
        (["plan", "budget", "--flops", "1e22", "--context", "-1"], "--context is -1; it must be"),
        (["plan", "memory", "--context", "0"], "--context is 0; it must be at least 1"),
        (["plan", "calibrate", ROWS, "--context", "0"], "--context is 0; it must be at least 1"),
        (
            ["plan", "calibrate", ROWS, "--devices", "8"],
            "--devices describes the plan of --model; name a model, or leave it out",
        ),
        (["plan", "budget", "--flops", "1e30", "--deadline", "1d"], "later --deadline"),
        (["plan", "budget", "--flops", "many"], "cannot read the flops"),
        (["plan", "budget", "--flops", "1e22", "--deadline", "soon"], "write it like 30d"),
    ],
)
def test_mistakes_are_named_with_their_remedy(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("device", ["H100-SXM", "NVIDIA H100 80GB HBM3", "h100-sxm"])
def test_devices_are_named_in_any_case(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEARCH, "--device", device, "--framework", "nemo", "--json"]) == 0
    search = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (search["device"], search["calibration"]) == ("h100-sxm", "nemo-h100-sxm-bfloat16")
    assert main(["plan", "memory", "--model", "small", "--device", device]) == 0
    assert "(NVIDIA H100 SXM5 80 GB)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["calibrate"],
        ["search", "--calibration"],
        ["step", "--calibration"],
        ["backtest"],
        ["memory", "--model"],
    ],
)
@pytest.mark.parametrize(
    "content", [None, b"{", b"\x89\xff\x00", b"{}", b"[" * 99_999, "directory"]
)
def test_a_file_that_cannot_be_used_is_a_usage_error(
    command: list[str],
    content: bytes | str | None,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / ("named.json" if command[0] == "memory" else "named.jsonl")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    assert main(["plan", *command, str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paceline: error: {path}")


def test_that_a_step_does_not_fit_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    step = ["plan", "memory", "--model", "llama3-70B", "--device", "h100-sxm"]
    assert main([*step, "--strategy", "torch_ddp"]) == 0
    assert capsys.readouterr().out.startswith("does not fit")
    assert main([*step, "--strategy", "torch_ddp", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["peak_bytes"] > values["device_memory_bytes"]


@pytest.mark.parametrize(
    "command",
    [
        [*SEARCH[1:], "--explain", "--framework", "megatron-bridge", "--tokens", "15T"],
        ["search", "--model", "qwen3-30B-A3B", "--precision", "float8", "--explain"],
        ["memory", "--model", "llama3-405B", "--device", "h100-sxm"],
        ["memory", "--model", "bytes-6M", "--strategy", "fsdp", "--device", "rtx-4090"],
        ["overhead", "--size", "135MB", "--bandwidth", "1GB/s", "--latency", "1ms"],
        ["account"],
        ["budget", "--flops", "1e26", "--deadline", "1000d", "--price", "2"],
        ["goodput", "--devices", "1024", "--trials", "1"],
    ],
    ids=" ".join,
)
def test_answers_fit_eighty_columns(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", *command]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    # The courses write their own figures with powers of ten.
    assert command == ["account"] or not re.search(r"\d[eE]\+\d", shown)


def test_a_budget_without_a_model_gets_twenty_tokens_per_parameter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "budget", "--flops", "1e22", "--deadline", "10d"]) == 0
    shown = capsys.readouterr().out
    assert "smallest:" in shown
    assert "20 tokens per parameter (8.78 billion" in shown
    words = " ".join(shown.split())
    assert "20 tokens per parameter: of all parameters, embeddings included, at 6 FLOPs" in words
    assert "at the FLOPs of this model, attention included, they are 16.9." in words
    assert main(["plan", "budget", "--flops", "1e22", "--model", "llama3-8B", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(row["smallest"] for row in rows) == sum(row["cheapest"] for row in rows) == 1


def test_counts_are_read_as_people_write_them() -> None:
    assert parse_batch_tokens("4M", 8192) == 512
    assert parse_batch_tokens("4194304", 4096) == 1024
    assert parse_count("15T", "tokens", "1e12") == 15e12
    assert parse_days("2w") == 14
    for text in ("4e6", "nan", "x"):
        with pytest.raises(UsageError):
            parse_batch_tokens(text, 8192)
