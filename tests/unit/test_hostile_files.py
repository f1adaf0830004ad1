"""Tests that damaged files give one-line errors.

`studies/reliability/hostile_files.py` tries more of them.
"""

import pathlib

import pytest

from tests.hostile_files import FILES, hostile_read


@pytest.mark.parametrize("subject", FILES)
def test_no_damage_leads_to_a_traceback(subject: str, tmp_path: pathlib.Path) -> None:
    problems = [hostile_read(subject, seed, tmp_path)[0] for seed in range(150)]
    assert [problem for problem in problems if problem] == []


@pytest.mark.parametrize("subject", FILES)
def test_what_is_not_damaged_is_read_as_far_as_its_example_goes(
    subject: str, tmp_path: pathlib.Path
) -> None:
    """Checks that readers accept undamaged examples, so that damage gets past the first check."""
    name, make, read = FILES[subject]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(make())
    read(tmp_path / name)
