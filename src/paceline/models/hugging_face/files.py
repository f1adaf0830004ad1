"""The directory of a Hugging Face model: config.json, weights in safetensors, the tokenizer.

Weights are written one shard at a time, so that memory does not grow with the model. A directory is
written under a temporary name and renamed when it is complete. Nothing here runs code from a file:
pickled weights are not read.
"""

import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.core.errors import UsageError
from paceline.core.units import Progress

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""The default of transformers 4; transformers 5 has 50 GB."""


def write_model(
    directory: pathlib.Path,
    files: Mapping[str, Mapping[str, Any] | str],
    sizes: Mapping[str, int],
    read: Callable[[Sequence[str]], Mapping[str, Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> None:
    """Writes a model in the format that transformers loads.

    Args:
        directory: Created atomically; it must not exist, or be empty.
        files: All other files by name, including config.json: text, or JSON.
        sizes: Size of every tensor in bytes, by the names that transformers uses.
        read: Returns the tensors with the given names.
        max_shard_bytes: Approximate maximum size of a weight file; one is in memory at a time.
        progress: Called after each weight file.
    """
    from safetensors.torch import save_file

    require_room(directory)
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for name, content in files.items():
        _write_text(unfinished / name, content)
    shards = _shards(sizes, max_shard_bytes)
    placed: dict[str, str] = {}
    done, total = 0, sum(sizes.values())
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in read(names).items()},
            unfinished / file,
            metadata={"format": "pt"},
        )
        placed |= dict.fromkeys(names, file)
        done += sum(sizes[name] for name in names)
        progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        _write_text(unfinished / INDEX, index)
    unfinished.rename(directory)


def require_room(directory: pathlib.Path) -> None:
    """Raises a `UsageError` unless a directory does not exist or is empty."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UsageError(f"{directory} already exists; name a new directory")


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """Returns config.json of a model's directory."""
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{path}: no such file; name the directory of a Hugging Face model"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: not a JSON object")
    return config


def weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the weight files of a model; empty if it has no safetensors."""
    index = directory / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{index}: not an index of weights: {error}") from error
        present = {path.name for path in directory.iterdir()}
        if missing := sorted(str(name) for name in names if name not in present):
            raise UsageError(f"{directory}: no file {missing[0][:80]!r}, though {INDEX} names it")
        return [directory / name for name in sorted(names)]
    return [directory / WEIGHTS] if (directory / WEIGHTS).exists() else []


def read_weights(directory: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors in a model's directory, by the names that transformers uses."""
    import safetensors
    from safetensors.torch import load_file

    files = weight_files(directory)
    if not files:
        raise UsageError(f"{directory}: no {WEIGHTS} and no {INDEX}; pickled weights are not read")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except safetensors.SafetensorError as error:
            raise UsageError(f"{file}: damaged: {error}; download it again") from error
    return weights


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Groups names, in order, by a maximum size; a larger tensor is a group by itself."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_text(path: pathlib.Path, content: Mapping[str, Any] | str) -> None:
    text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
    path.write_text(text, encoding="utf-8")
