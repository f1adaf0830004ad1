"""Tests that damaged files give one-line errors.

`studies/reliability/hostile_files.py` tries more of them.
"""

import pathlib

import pytest

from paceline.core.errors import PacelineError
from tests.hostile_files import FILES, hostile_read

_FOUND = [
    ("records", b'"environment"', rb'"\nvironment"', r"unknown field `\\nvironment`"),
    ("searched plan", b'"gradients":"', rb'"gradi\nents":"', r"\$.precision.gradi\\nents`"),
    ("dataset manifest", b'"shard_tokens":100', b'"shard_tokens":10', "end before they begin"),
    ("dataset manifest", b'"shard_tokens":100', b'"shard_tokens":1' + b"0" * 99, "int"),
    ("dataset manifest", b'"shard_tokens":100', b'"shard_tokens":0', "`int` >= 1"),
    ("dataset manifest", b'"end_of_document"', rb'"end_of_docum\nt"', r"field `end_of_docum\\nt`"),
    ("dataset manifest", b'"num_tokens":200', b'"num_tokens":1996', "2.documents is missing"),
    ("checkpoint manifest", b'"F32"', b'"F33"', "has the dtype 'F33'"),
    ("checkpoint manifest", b'.bias.step"', b'.bias.stop"', "the optimizer's state lacks 'step'"),
]
"""Edits that fuzzing has found, and what must be said of them on one line."""


@pytest.mark.parametrize("subject", FILES)
def test_no_damage_leads_to_a_traceback(subject: str, tmp_path: pathlib.Path) -> None:
    problems = [hostile_read(subject, seed, tmp_path)[0] for seed in range(150)]
    assert [problem for problem in problems if problem] == []


@pytest.mark.parametrize(("subject", "before", "after", "message"), _FOUND)
def test_what_fuzzing_has_found(
    subject: str, before: bytes, after: bytes, message: str, tmp_path: pathlib.Path
) -> None:
    name, make, read = FILES[subject]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    content = make()
    assert before in content
    (tmp_path / name).write_bytes(content.replace(before, after))
    with pytest.raises(PacelineError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("subject", FILES)
def test_what_is_not_damaged_is_read_as_far_as_its_example_goes(
    subject: str, tmp_path: pathlib.Path
) -> None:
    """Checks that readers accept undamaged examples, so that damage gets past the first check."""
    name, make, read = FILES[subject]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(make())
    read(tmp_path / name)
