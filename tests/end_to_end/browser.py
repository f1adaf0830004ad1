"""The browser that tests open pages in."""

import shutil

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str:
    """Returns the path of a browser; skips the test if there is none."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser to open the page in; install one of {', '.join(_BROWSERS)}")
    return browser
