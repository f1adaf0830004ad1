"""Tests of ``paceline report build`` as run by a user, and of its page in a browser."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from paceline.course.suite import Suite, SuiteCase
from paceline.records import RecordStore
from tests.end_to_end.browser import find_browser
from tests.end_to_end.test_command_line import FAST, paceline

ROOT = pathlib.Path(__file__).parents[2]
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a report of the committed records, built by the command."""
    directory = tmp_path_factory.mktemp("report")
    with (directory / "store.jsonl").open("wb") as store:
        for path in sorted((ROOT / "results").glob("*.jsonl")):
            store.write(path.read_bytes())
    result = paceline(
        *("report", "build", "--store", "store.jsonl", "--out", "out", "--json"), cwd=directory
    )
    paths = [json.loads(line)["path"] for line in result.stdout.splitlines()]
    assert paths == ["out/report.html", "out/report.md"]
    assert result.stderr == ""
    return directory / "out"


@pytest.mark.slow
def test_the_report_holds_what_was_measured(built: pathlib.Path) -> None:
    page = (built / "report.html").read_text(encoding="utf-8")
    assert page.count("<section") == 17
    assert page.count("<img") > 15
    assert "links of 2 Gbit/s" in page
    markdown = (built / "report.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^## ", markdown, re.MULTILINE)) == 17
    pictures = re.findall(r"\]\((figures/[^)]+)\)", markdown)
    assert all((built / path).exists() for path in pictures)


@pytest.mark.slow
def test_the_page_fits_a_desk_and_a_phone(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    browser = find_browser()
    # The page itself may not run scripts, so another page measures it in frames of both widths.
    frames = "".join(
        f'<iframe src="{(built / "report.html").as_uri()}" width="{width}" height="900" '
        'style="border:0"></iframe>'
        for width in WIDTHS
    )
    script = (
        "onload = () => { document.title = JSON.stringify([...document.querySelectorAll('iframe')]"
        ".map(frame => { const page = frame.contentDocument; return ["
        "page.documentElement.clientWidth, page.documentElement.scrollWidth,"
        "[...page.images].filter(image => !image.complete || !image.naturalWidth).length,"
        "[...page.images].length, getComputedStyle(page.querySelector('.scroll')).overflowX]; })) }"
    )
    viewer = tmp_path / "viewer.html"
    viewer.write_text(f"<!DOCTYPE html><body>{frames}<script>{script}</script>", encoding="utf-8")
    result = subprocess.run(
        [
            *(browser, "--headless", "--disable-gpu", "--no-sandbox", "--disable-web-security"),
            *("--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--virtual-time-budget=20000", "--dump-dom", viewer.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r"<title>(.*?)</title>", result.stdout)
    assert match is not None, result.stderr
    found = json.loads(match[1])
    assert len(found) == len(WIDTHS)
    for width, (client, scroll, unloaded, num_images, overflow) in zip(WIDTHS, found, strict=True):
        assert client <= width
        assert scroll <= width
        assert unloaded == 0
        assert num_images > 15
        assert overflow == "auto"


@pytest.mark.slow
def test_a_suite_measures_for_real(tmp_path: pathlib.Path) -> None:
    case = SuiteCase(
        name="tiny",
        deliverables=("benchmarking_script",),
        verb="bench step",
        kind="step",
        fields={"warmup": 1, "steps": 1},
        defaults={"model": "custom", "context": 16},
        options=tuple(FAST),
        seconds=10.0,
    )
    suite = Suite(
        cases=(case,), store=RecordStore(tmp_path / "store.jsonl"), workspace=tmp_path / "work"
    )
    assert suite.run(lambda _text: None) == 0
    assert not suite.missing()
    example = subprocess.run(
        [sys.executable, ROOT / "examples" / "build_report.py", suite.store.path],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert "Time of a training step, Warm-up: paceline bench step" in example.stdout
    assert "By model" not in example.stdout


def test_asking_wrongly(tmp_path: pathlib.Path) -> None:
    for arguments, message in (
        (["--quick"], "give --preset as well"),
        ([], "cannot read the record store"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "paceline", "report", "build", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert result.returncode in (1, 2)
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
