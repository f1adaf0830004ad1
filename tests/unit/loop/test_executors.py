"""Tests of finding live jobs of an array by squeue's output; a real Slurm is tested elsewhere."""

import pathlib

import pytest

from paceline.loop.executors import _alive


@pytest.mark.parametrize(
    ("script", "alive"),
    [
        ("printf '7_0\\n7_2\\n'", {"7_0", "7_2"}),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", set()),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", None),
    ],
)
def test_jobs_are_gone_only_if_slurm_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, script: str, alive: set[str] | None
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n{script}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert _alive("7") == alive
