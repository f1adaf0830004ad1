"""Tests that invalid options are refused by flag name, and that configs import nothing heavy."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest

from paceline.core.errors import UsageError
from paceline.data.prepare.config import TokenizerConfig
from tests.unit.data.corpus import config_of

HERE = pathlib.Path()


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"sources": ()}, "at least one file"),
        ({"heldout": 1.0}, "--heldout 1.0"),
        ({"heldout": -0.1}, "--heldout -0.1"),
        ({"shard_tokens": 0}, "--shard-tokens 0"),
        ({"shard_tokens": 2**32}, "--shard-tokens 4294967296"),
        ({"max_document_bytes": 0}, "--max-document-bytes 0"),
        ({"workers": 0}, "--workers 0"),
        ({"ray_address": "x"}, "--ray-address needs --engine ray"),
    ],
)
def test_options_that_make_no_sense(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        config_of(HERE, HERE, **changes)


def test_separators_may_be_written_for_a_shell() -> None:
    assert config_of(HERE, HERE, separator=r"\n\n").separator_bytes == b"\n\n"
    assert config_of(HERE, HERE, separator="\t|").separator_bytes == b"\t|"
    assert config_of(HERE, HERE, workers=None).num_local_workers >= 1


def test_a_sample_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="--sample-bytes 0"):
        TokenizerConfig(sources=("x",), out="y", sample_bytes=0)


def test_options_load_nothing_heavy() -> None:
    code = (
        "import sys, paceline.data.prepare.config\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'blake3', 'ray', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_preparing_never_loads_torch() -> None:
    code = (
        "import sys, paceline.data.prepare.run, paceline.data.prepare.tokenize\n"
        "heavy = {'torch', 'scipy', 'ray', 'pyarrow', 'zstandard', 'obstore'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
