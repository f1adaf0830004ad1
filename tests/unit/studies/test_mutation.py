"""Tests that mutation testing changes what it says, one edit at a time."""

import pathlib
import sys
import types
from collections.abc import Callable

import pytest

from studies.mutation.mutants import Mutant, Promises, instrument

SOURCE = '''
"""A room."""

LIMIT = 3

def checked(values: list[int], limit: int = LIMIT, *, strict: bool = False) -> list[int]:
    """Returns values."""
    kept = []
    for value in values:
        if value >= limit and not strict:
            continue
        kept.append(value * 2)
    if strict:
        raise ValueError(f"{len(values)} are {'many' if len(values) > 2 else 'few'}")
    return kept
'''
EXPECTED = {
    ("value >= limit", "value > limit"),
    ("value >= limit and (not strict)", "value >= limit or not strict"),
    ("not strict", "strict"),
    ("continue", "pass"),
    ("kept.append(value * 2)", "pass"),
    ("value * 2", "value + 2"),
    ("2", "3"),
    ("strict", "not strict"),
    ("raise ValueError(f\"{len(values)} are {('many' if len(values) > 2 else 'few')}\")", "pass"),
}
"""Every edit; defaults, constants of the module and texts are not edited."""


@pytest.fixture
def room(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Mutant], Callable[[list[int], int], list[int]], list[int]]:
    (tmp_path / "room.py").write_text(SOURCE)
    text, mutants = instrument(tmp_path / "room.py", "room.py", first=7, edits=Promises)
    active = [0]
    switch = types.ModuleType("paceline.mutants_")
    switch.hit = lambda number: number == active[0]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.mutants_", switch)
    namespace: dict[str, Callable[[list[int], int], list[int]]] = {}
    exec(compile(text, "room.py", "exec"), namespace)
    return mutants, namespace["checked"], active


def test_every_edit_is_made_once(
    room: tuple[list[Mutant], Callable[[list[int], int], list[int]], list[int]],
) -> None:
    mutants, checked, active = room
    assert {(each.before, each.after) for each in mutants} == EXPECTED
    assert [each.number for each in mutants] == list(range(7, 7 + len(EXPECTED)))
    assert {each.function for each in mutants} == {"checked"}
    results = {}
    for mutant in mutants:
        active[0] = mutant.number
        try:
            results[mutant.before, mutant.after] = checked([1, 2, 3, 4], 3)
        except ValueError:
            results[mutant.before, mutant.after] = []
    assert results["value >= limit", "value > limit"] == [2, 4, 6]
    assert results["continue", "pass"] == [2, 4, 6, 8]
    assert results["value * 2", "value + 2"] == [3, 4]
    active[0] = 0
    assert checked([1, 2, 3, 4], 3) == [2, 4]


def test_the_switch_is_shared_and_notes_what_is_passed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from studies.mutation import switch

    shared = tmp_path / "shared"
    shared.write_bytes(bytes(switch.NOTES + 10))
    monkeypatch.setenv(switch.SWITCH, str(shared))
    namespace: dict[str, Callable[[int], bool]] = {}
    exec(pathlib.Path(switch.__file__).read_text(), namespace)
    assert not namespace["hit"](4)
    content = bytearray(shared.read_bytes())
    assert [index for index, value in enumerate(content[switch.NOTES :]) if value] == [4]
    with shared.open("r+b") as file:
        file.write((4).to_bytes(8, sys.byteorder))
    assert namespace["hit"](4)
    assert not namespace["hit"](5)
