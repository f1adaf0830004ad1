"""The manual as a reader opens it: from disk, in a browser, without a network."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.end_to_end.browser import find_browser
from tests.end_to_end.test_report_build import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pages_load_nothing_from_other_hosts_and_search_works_from_disk(
    tmp_path: pathlib.Path,
) -> None:
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        check=True,
    )
    for page in site.glob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)', page.read_text()
        )
        assert loaded == [], page.name
    browser = find_browser()
    result = subprocess.run(
        [
            *(browser, "--headless", "--disable-gpu", "--no-sandbox"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"),
            *("--dump-dom", f"{(site / 'index.html').as_uri()}?q=reduce-scatter"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "matching documents" in result.stdout
