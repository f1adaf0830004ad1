"""Layout of one safetensors file: a header that locates the tensors, followed by their bytes.

The header does not depend on the tensors' values. A file is therefore written front to back, one
tensor at a time, and any program that reads safetensors can open it.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element, by safetensors name of the dtype."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A chunk of a tensor, as stored in a file."""

    name: str
    """Name of the tensor."""
    dtype: str
    offsets: tuple[int, ...]
    """Start of the chunk in the tensor."""
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def label(self) -> str:
        """Name in the file; a part of a tensor has its ranges in the name."""
        if self.shape == self.full_shape:
            return self.name
        ranges = zip(self.offsets, self.shape, strict=True)
        return f"{self.name}[{','.join(f'{start}:{start + size}' for start, size in ranges)}]"


def order_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Returns pieces widest dtype first, which aligns each to its element size."""
    return sorted(pieces, key=lambda piece: (-ITEM_BYTES[piece.dtype], piece.label))


def encode_header(pieces: Sequence[Piece]) -> bytes:
    """Returns the header of a file in which the pieces follow back to back."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for piece in pieces:
        end = start + piece.num_bytes
        entries[piece.label] = {
            "dtype": piece.dtype,
            "shape": piece.shape,
            "data_offsets": (start, end),
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def split_into_files(pieces: Sequence[Piece], max_file_bytes: int) -> list[list[Piece]]:
    """Groups pieces into files of bounded size; a larger piece gets its own file."""
    files: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if not files or piece.num_bytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(piece)
        room -= piece.num_bytes
    return files
