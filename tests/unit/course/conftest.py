"""Drawing takes most of an answer's time, and most tests look at findings alone."""

from typing import Any

import pytest

from paceline.course.answers import block, profile
from paceline.reports.document.model import Picture


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for drawing: pictures have a name and a description only."""

    def draw(*arguments: Any) -> Picture:
        *_, name, description = arguments
        return Picture(name=name, description=description, svg=b"<svg/>")

    monkeypatch.setattr(block, "draw_picture", draw)
    monkeypatch.setattr(profile, "picture_of", draw)
