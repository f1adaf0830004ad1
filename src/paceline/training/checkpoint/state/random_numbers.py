"""Random state of this rank, as JSON."""

import base64
import random
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.training.checkpoint.format.manifest import Json


def capture_random_state() -> Json:
    """Returns the state of every generator that training may draw from."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
        "python": [version, _encode(np.array(words, np.uint32).tobytes()), gauss],
        "numpy": [
            str(name),
            _encode(np.asarray(keys, np.uint32).tobytes()),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state().numpy().tobytes())
    return state


def restore_random_state(state: Json) -> None:
    """Restores the state of every generator.

    Args:
        state: Result of `capture_random_state`.
    """
    torch.set_rng_state(_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(_decode(words), np.uint32).tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(
        (name, np.frombuffer(_decode(keys), np.uint32), position, has_gauss, cached)
    )
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _encode(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def _decode(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
