"""Skips drawing, which takes most of an answer's time, in tests that check only numbers."""

import pytest

from paceline.course import answers, steps
from paceline.reports.document import Picture


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces drawing: pictures have only a name and a description."""

    def draw(*arguments: object) -> Picture:
        return Picture(name=str(arguments[-2]), description=str(arguments[-1]), svg=b"<svg/>")

    monkeypatch.setattr(answers, "draw_picture", draw)
    monkeypatch.setattr(steps, "picture_of", draw)
