"""The plan of a preparation: groups the source files into pieces to tokenize.

Pieces depend only on the files and options, never on the number of workers. Plain text and JSON
Lines are split by byte range, Parquet by row group, Megatron datasets by document. A compressed
file is one span. Small files share a piece.
"""

from collections.abc import Iterable, Iterator

import msgspec

from paceline.core.units import MIB
from paceline.data.megatron import MegatronDataset
from paceline.data.sources.cutting import overlaps_itself
from paceline.data.sources.files import FoundFile
from paceline.data.sources.parquet import row_group_bytes
from paceline.data.sources.read import ReadOptions, Span

SMALLEST_PIECE_BYTES = MIB
"""About one second of work."""
_USUAL_PIECE_BYTES = 8 * MIB
_USUAL_PIECES, _MOST_PIECES = 2**10, 2**16
_MOST_SPANS = 2**12
"""Maximum number of spans in a piece: a packed place has 16 bits for the span."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The input of one tokenization task."""

    spans: tuple[Span, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(span.num_bytes for span in self.spans)

    @property
    def label(self) -> str:
        """Name of the piece in error messages."""
        first = self.spans[0]
        more = f" and {len(self.spans) - 1} more files" if len(self.spans) > 1 else ""
        return f"{first.file.name} from {first.start}{more}"


def plan_pieces(files: Iterable[FoundFile], reading: ReadOptions) -> list[Piece]:
    """Splits and groups files into pieces of similar size, in the order of the files."""
    files = list(files)
    piece_bytes = _piece_bytes(sum(file.num_bytes for file in files))
    pieces = []
    spans: list[Span] = []
    num_bytes = 0
    for file in files:
        for span in _spans(file, reading, piece_bytes):
            spans.append(span)
            num_bytes += span.num_bytes
            if num_bytes >= piece_bytes or len(spans) == _MOST_SPANS:
                pieces.append(Piece(spans=tuple(spans)))
                spans, num_bytes = [], 0
    if spans:
        pieces.append(Piece(spans=tuple(spans)))
    return pieces


def _piece_bytes(total_bytes: int) -> int:
    """Returns the size of a piece: small for many workers, but large enough to limit pieces."""
    piece_bytes = SMALLEST_PIECE_BYTES
    while piece_bytes * _MOST_PIECES < total_bytes or (
        piece_bytes < _USUAL_PIECE_BYTES and piece_bytes * _USUAL_PIECES < total_bytes
    ):
        piece_bytes *= 2
    return piece_bytes


def _spans(file: FoundFile, reading: ReadOptions, piece_bytes: int) -> Iterator[Span]:
    if file.kind == "parquet":
        yield from _row_group_spans(file, row_group_bytes(file, reading.field), piece_bytes)
        return
    if file.kind == "megatron":
        num_documents = len(MegatronDataset(file.path, file.name))
        per_span = max(1, num_documents * piece_bytes // max(1, file.num_bytes))
        for start in range(0, num_documents, per_span):
            end = min(start + per_span, num_documents)
            num_bytes = file.num_bytes * (end - start) // num_documents
            yield Span(file=file, start=start, end=end, num_bytes=num_bytes)
        return
    separator = b"\n" if file.kind == "jsonl" else reading.separator
    can_be_cut = file.compression is None and separator and not overlaps_itself(separator)
    if not can_be_cut or file.num_bytes <= piece_bytes:
        yield Span(file=file, start=0, end=None, num_bytes=file.num_bytes)
        return
    for start in range(0, file.num_bytes, piece_bytes):
        end = min(start + piece_bytes, file.num_bytes)
        yield Span(file=file, start=start, end=end, num_bytes=end - start)


def _row_group_spans(file: FoundFile, sizes: list[int], piece_bytes: int) -> Iterator[Span]:
    start = num_bytes = 0
    for group, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= piece_bytes or group == len(sizes) - 1:
            yield Span(file=file, start=start, end=group + 1, num_bytes=num_bytes)
            start, num_bytes = group + 1, 0
