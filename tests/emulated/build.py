"""Builds the extension of the emulated device, once per version of its source and of torch.

    python tests/emulated/build.py      builds it, so that the first test need not wait

The result is kept in the user's cache. A process that finds another building waits for it.
"""

import fcntl
import hashlib
import importlib.util
import os
import pathlib
import shutil
import sys
import tempfile
import types

import torch

_SOURCES = sorted((pathlib.Path(__file__).parent / "csrc").glob("*"))
_FLAGS = ["-O1", "-g0", "-std=c++20", "-Wno-attributes"]
_MODULE = "emulated_device_C"


def obstacle() -> str | None:
    """Returns why the extension cannot be built; None if it can."""
    for program in ("g++", "ninja"):
        if shutil.which(program) is None:
            return f"the emulated device needs {program}"
    return None


def _directory() -> pathlib.Path:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for path in _SOURCES:
        digest.update(path.read_bytes())
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "paceline-tests" / f"emulated-{digest.hexdigest()[:16]}"


def built() -> pathlib.Path:
    """Returns the extension's file, after building it if necessary."""
    directory = _directory()
    file = directory / f"{_MODULE}.so"
    if file.exists():
        return file
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            _build(directory)
    return file


def _build(directory: pathlib.Path) -> None:
    from torch.utils.cpp_extension import load

    os.environ.setdefault("MAX_JOBS", str(os.cpu_count()))
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        load(
            name=_MODULE,
            sources=[str(path) for path in _SOURCES if path.suffix == ".cpp"],
            extra_cflags=_FLAGS,
            build_directory=temporary,
            is_python_module=False,
        )
        finished = pathlib.Path(temporary) / "finished"
        finished.mkdir()
        shutil.move(f"{temporary}/{_MODULE}.so", finished)
        # Last, and at once: another process may look for the file at any time.
        finished.rename(directory)


def library() -> types.ModuleType:
    """Returns the extension, loaded."""
    specification = importlib.util.spec_from_file_location(_MODULE, built())
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.stdout.write(f"{obstacle() or built()}\n")
