"""Drawing takes most of an answer's time, and most tests look at findings alone."""

import pytest

from paceline.course.answers import block, profile
from paceline.reports.document.model import Picture


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for drawing: pictures have a name and a description only."""

    def draw(*arguments: object) -> Picture:
        return Picture(name=str(arguments[-2]), description=str(arguments[-1]), svg=b"<svg/>")

    monkeypatch.setattr(block, "draw_picture", draw)
    monkeypatch.setattr(profile, "picture_of", draw)
