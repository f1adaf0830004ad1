"""Tests of the values that a checkpoint holds as JSON, and of what failures are translated to."""

import collections
import enum
import errno
import json
import os
import pathlib
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.dcp import dtype_name, dtype_of, encode_json, named_failures
from paceline.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    cannot_list,
    cannot_move,
    cannot_read,
    cannot_write,
)
from paceline.checkpoint.format import ITEM_BYTES, decode_manifest
from paceline.checkpoint.restore import load_step
from paceline.core.errors import PacelineError


class Number(enum.IntEnum):
    ONE = 1


_DEEP: list[Any] = []
for _ in range(100_000):
    _DEEP = [_DEEP]


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2**70, 0.1, "ü", [], {}, [1, [2.5, None]], {"a": {"b": [{"c": False}]}}],
)
def test_json_values_are_kept_as_they_are(value: Any) -> None:
    assert json.loads(encode_json(value, "x")) == value


@pytest.mark.parametrize(
    "value",
    [
        *((1, 2), [(1,)], {"a": (1,)}, {1: 2}, {"a": {1: 2}}, {None: 1}, {True: 1}),
        *(b"x", {1}, 1j, object(), float("nan"), float("inf"), [float("-inf")]),
        *(Number.ONE, [Number.ONE], _DEEP),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_would_come_back_as_another_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^the seed: a checkpoint can contain tensors and"):
        encode_json(value, "the seed")


def test_an_ordered_dictionary_is_a_dictionary() -> None:
    assert encode_json(collections.OrderedDict(b=1, a=2), "x") == b'{"b": 1, "a": 2}'


def test_a_value_that_is_nested_too_deeply_is_refused_like_any_other() -> None:
    with pytest.raises(CheckpointError, match=r"a list \(nested too deeply to be shown\); convert"):
        encode_json(_DEEP, "x")


@pytest.mark.parametrize(("length", "is_whole"), [(57, True), (58, False)])
def test_a_refused_value_is_shown_in_brief(length: int, is_whole: bool) -> None:
    content = b"x" * length  # Its text has three characters more.
    shown = f"b'{'x' * length}'" if is_whole else f"b'{'x' * 58}..."
    with pytest.raises(CheckpointError) as error:
        encode_json(content, "x")
    assert f"not a bytes ({shown}); convert it" in str(error.value)


def test_dtypes_have_names_and_sizes_that_agree() -> None:
    for name, num_bytes in ITEM_BYTES.items():
        dtype = dtype_of(name)
        assert dtype.itemsize == num_bytes
        assert dtype_name(dtype, "x") == name


def _failing(*failures: tuple[int, BaseException]) -> CheckpointException:
    return CheckpointException("plan", {rank: (error, None) for rank, error in failures})  # type: ignore[misc]


def _translated(*failures: tuple[int, BaseException]) -> CheckpointError:
    with pytest.raises(CheckpointError) as found, named_failures("saving here"):
        raise _failing(*failures)
    return found.value


def test_of_several_failures_damage_is_named_last() -> None:
    """An older checkpoint helps against damage only."""
    damaged, other = DamagedCheckpointError("damaged"), CheckpointError("full")
    for failures in ([(0, damaged), (2, other)], [(1, ValueError("x")), (2, other), (0, damaged)]):
        error = _translated(*failures)
        assert type(error) is CheckpointError
        assert str(error) == "saving here: rank 2: full"
    error = _translated((0, ValueError("x")), (3, damaged))
    assert type(error) is DamagedCheckpointError
    assert str(error) == "saving here: rank 3: damaged"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError])
def test_what_does_not_fit_is_asked_about_another_model(kind: type[Exception]) -> None:
    message = str(_translated((1, kind("size"))))
    assert message.startswith(f"saving here: rank 1: {kind.__name__}: ")
    assert message.endswith("; is it a checkpoint of another model or optimizer?")


def test_other_failures_are_named_as_they_are() -> None:
    assert str(_translated((1, MemoryError("much")))) == "saving here: rank 1: MemoryError: much"
    assert str(_translated((1, PacelineError("own words")))) == "saving here: rank 1: own words"


def test_one_process_is_not_warned_that_it_is_alone(tmp_path: pathlib.Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
            checkpointer.save(1, {"x": torch.ones(2)}, None)
        load_step(tmp_path, 1, lambda source: source.load({"x": torch.zeros(2)}))
        assert [str(one.message) for one in seen if "disabled" in str(one.message)] == []
        with named_failures("saving"):
            warnings.warn("torch.distributed is disabled, assuming one process", stacklevel=1)
            warnings.warn("the disk is slow", stacklevel=1)
    assert [str(one.message) for one in seen] == ["the disk is slow"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        *((errno.ENOSPC, "free disk space"), (errno.EDQUOT, "free disk space")),
        *((errno.EROFS, "that can be written to"), (errno.EACCES, "that can be written to")),
        *((errno.EPERM, "that can be written to"), (errno.EIO, "the disk is failing")),
        (errno.ENOTDIR, "check the place, or name another one"),
    ],
)
def test_each_error_of_a_disk_has_its_remedy(number: int, remedy: str) -> None:
    text = os.strerror(number)
    message = str(cannot_write("/a/b", OSError(number, text)))
    assert message.startswith(f"/a/b: {text}, so this checkpoint was not saved; ")
    assert remedy in message
    assert message.endswith("; earlier checkpoints are not affected")


def test_errors_without_a_number_are_named_by_their_text() -> None:
    for make in (cannot_write, cannot_move, cannot_list, cannot_read):
        error = make(pathlib.Path("/a"), OSError("gone"))
        assert str(error).startswith("/a: gone")
        assert isinstance(error, DamagedCheckpointError) == (make is cannot_read)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"blake3": "x"}', b"\xff", b"null"])
def test_what_is_no_manifest_is_damage(content: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"^here: not the manifest of a checkpoint"):
        decode_manifest(content, "here")
