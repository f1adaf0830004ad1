"""Pytest plugin that appends a record of every test to one file as soon as the test has ended.

    python -m pytest -m gpu -p tests.check_records --check-records gpu-checks.jsonl

So the owner of a GPU sends back what was seen there, and an interrupted slow suite keeps what it
has done. The record of a passed test has the numbers that it gave to `record_property`; that of a
failed or skipped test has the reason.
"""

import pathlib

import pytest

from paceline.records import Outcome, Record, RecordStore

_OPTION = "--check-records"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        _OPTION, type=pathlib.Path, default=None, help="append a record of every test's outcome"
    )


def pytest_configure(config: pytest.Config) -> None:
    # The workers of pytest-xdist report to the process that started them.
    if (path := config.getoption(_OPTION)) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(CheckRecorder(path))


class CheckRecorder:
    """Appends a record of each test, whether it passed, failed or was skipped."""

    def __init__(self, path: pathlib.Path) -> None:
        self._store = RecordStore(path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test that fails or is skipped in its setup has no call; any other reports in its call.
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self._store.append(check_record(report))


def check_record(report: pytest.TestReport) -> Record:
    """Returns the record of a test's outcome."""
    # Imported late: conftest.py first decides how torch and the kernels are loaded.
    import torch

    from paceline.benchmarks.harness.measure import measured, resolve_device
    from paceline.devices.hardware import describe_hardware

    device = resolve_device("auto")
    on_gpu = device.type == "cuda"
    outcome: Outcome = "ok" if report.passed else "skipped" if report.skipped else "failed"
    numbers = {
        name: float(value)
        for name, value in report.user_properties
        if isinstance(value, (int, float))
    }
    return measured(
        "check",
        {
            "name": report.nodeid,
            "world_size": torch.cuda.device_count() if on_gpu else 1,
            "backend": "nccl" if on_gpu else "gloo",
            **describe_hardware(device).as_case(),
        },
        {"time_s": report.duration, **numbers} if report.passed else {},
        outcome=outcome,
        reason=None if report.passed else _reason(report),
    )


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return text.strip()[-2000:] or "no reason was given"
