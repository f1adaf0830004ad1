"""Cuts source files into pieces, and tokenizes pieces or trains a tokenizer on some of them.

Pieces depend only on the files and options, never on the number of workers. Plain text and JSON
Lines are split by byte range, Parquet by row group, Megatron datasets by document. A compressed
file is one span. Small files share a piece. The id of a piece is a digest of everything that
determines its result: the state of its files, its ranges, the tokenizer and the options. So a
restarted preparation reuses finished pieces, even if other files have been added.
"""

import itertools
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError, UsageError
from paceline.core.units import MIB, Progress
from paceline.data.documents import (
    Document,
    LeftOut,
    ReadOptions,
    SourceSpan,
    TokenDocument,
    describe_location,
    overlaps_itself,
    read_span,
    row_group_bytes,
)
from paceline.data.manifest import Dropped, SplitName
from paceline.data.megatron import MegatronDataset
from paceline.data.prepare.config import TokenizerConfig
from paceline.data.prepare.job import (
    BLOCK_DOCUMENTS,
    BLOCK_TOKENS,
    DOCUMENT,
    BlockCounts,
    Job,
    PieceResult,
    Rows,
    digest,
    is_heldout,
    merge_dropped,
    once,
    pack_location,
    piece_name,
    reading_options,
    write_block,
)
from paceline.data.source_files import FoundFile, find_files
from paceline.data.storage import open_storage
from paceline.data.tokenizer import Tokenizer, one_thread, train_bpe

SMALLEST_PIECE_BYTES = MIB
"""About one second of work."""
_USUAL_PIECE_BYTES = 8 * MIB
_USUAL_PIECES, _MOST_PIECES = 2**10, 2**16
_MOST_SPANS = 2**12
"""Maximum number of spans in a piece: a packed location has 16 bits for the span."""


class SourcePiece(msgspec.Struct, frozen=True, kw_only=True):
    """The input of one tokenization task."""

    spans: tuple[SourceSpan, ...]

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


def plan_pieces(files: Iterable[FoundFile], reading: ReadOptions) -> list[SourcePiece]:
    """Splits and groups files into pieces of similar size, in the order of the files."""
    files = list(files)
    piece_bytes = _piece_bytes(sum(file.num_bytes for file in files))
    pieces = []
    spans: list[SourceSpan] = []
    num_bytes = 0
    for file in files:
        for span in _spans(file, reading, piece_bytes):
            spans.append(span)
            num_bytes += span.num_bytes
            if num_bytes >= piece_bytes or len(spans) == _MOST_SPANS:
                pieces.append(SourcePiece(spans=tuple(spans)))
                spans, num_bytes = [], 0
    if spans:
        pieces.append(SourcePiece(spans=tuple(spans)))
    return pieces


def _piece_bytes(total_bytes: int) -> int:
    """Returns the size of a piece: small for many workers, but large enough to limit pieces."""
    piece_bytes = SMALLEST_PIECE_BYTES
    while piece_bytes * _MOST_PIECES < total_bytes or (
        piece_bytes < _USUAL_PIECE_BYTES and piece_bytes * _USUAL_PIECES < total_bytes
    ):
        piece_bytes *= 2
    return piece_bytes


def _spans(file: FoundFile, reading: ReadOptions, piece_bytes: int) -> Iterator[SourceSpan]:
    if file.kind == "parquet":
        yield from _row_group_spans(file, row_group_bytes(file, reading.field), piece_bytes)
        return
    if file.kind == "megatron":
        num_documents = len(MegatronDataset(file.path, file.name))
        per_span = max(1, num_documents * piece_bytes // max(1, file.num_bytes))
        for start in range(0, num_documents, per_span):
            end = min(start + per_span, num_documents)
            num_bytes = file.num_bytes * (end - start) // num_documents
            yield SourceSpan(file=file, start=start, end=end, num_bytes=num_bytes)
        return
    separator = b"\n" if file.kind == "jsonl" else reading.separator
    can_be_cut = file.compression is None and separator and not overlaps_itself(separator)
    if not can_be_cut or file.num_bytes <= piece_bytes:
        yield SourceSpan(file=file, start=0, end=None, num_bytes=file.num_bytes)
        return
    for start in range(0, file.num_bytes, piece_bytes):
        end = min(start + piece_bytes, file.num_bytes)
        yield SourceSpan(file=file, start=start, end=end, num_bytes=end - start)


def _row_group_spans(file: FoundFile, sizes: list[int], piece_bytes: int) -> Iterator[SourceSpan]:
    start = num_bytes = 0
    for group, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= piece_bytes or group == len(sizes) - 1:
            yield SourceSpan(file=file, start=start, end=group + 1, num_bytes=num_bytes)
            start, num_bytes = group + 1, 0


_BATCH_BYTES = MIB
_BATCH_DOCUMENTS = 4096


class PieceTask(msgspec.Struct, frozen=True, kw_only=True):
    """A piece to tokenize."""

    job: Job
    piece: SourcePiece

    @property
    def label(self) -> str:
        """Name of the task in error messages."""
        return self.piece.label

    @property
    def piece_id(self) -> str:
        """Digest of everything that determines the result."""
        spans = [
            (span.file.name, span.file.num_bytes, span.file.modified_ns, span.start, span.end)
            for span in self.piece.spans
        ]
        job = self.job
        return digest(spans, job.reading, job.tokenizer_blake3, job.end_of_document, job.heldout)


def tokenize_piece(task: PieceTask) -> PieceResult:
    """Writes the blocks of a piece and then its marker, unless the marker exists."""
    marker = piece_name(task.piece_id, "finished.json")
    return once(task.job, marker, PieceResult, lambda: _write_blocks(task))


def _write_blocks(task: PieceTask) -> PieceResult:
    writer = _BlockWriter(task.job, task.piece_id)
    with one_thread():
        for number, span in enumerate(task.piece.spans):
            span.file.require_unchanged()
            for batch in _batches(span, task.job, writer):
                writer.add(number, batch, span)
            span.file.require_unchanged()
    return writer.finish()


def _batches(
    span: SourceSpan, job: Job, writer: "_BlockWriter"
) -> Iterator[list[Document] | list[TokenDocument]]:
    """Yields a span's documents in batches and reports dropped documents to the writer."""
    batch: list[Document] = []
    tokens: list[TokenDocument] = []
    num_bytes = 0
    for found in read_span(span, job.reading):
        if isinstance(found, Document):
            batch.append(found)
            num_bytes += len(found.text)
        elif isinstance(found, TokenDocument):
            tokens.append(found)
            num_bytes += found.tokens.nbytes
        else:
            writer.leave_out(found, span)
            continue
        if num_bytes >= _BATCH_BYTES or max(len(batch), len(tokens)) >= _BATCH_DOCUMENTS:
            yield batch or tokens
            batch, tokens, num_bytes = [], [], 0
    if batch or tokens:
        yield batch or tokens


class _BlockWriter:
    """Collects documents and writes a block whenever it is full."""

    def __init__(self, job: Job, piece_id: str) -> None:
        self._job = job
        self._piece_id = piece_id
        self._tokenizer = job.tokenizer()
        self._written: list[BlockCounts] = []
        self._dropped: dict[str, Dropped] = {}
        self._begin()

    def add(
        self,
        span_number: int,
        batch: Sequence[Document] | Sequence[TokenDocument],
        span: SourceSpan,
    ) -> None:
        """Adds documents of a span."""
        rows = np.empty(len(batch), DOCUMENT)
        hashes, num_bytes, tokens, lengths = _encode(self._tokenizer, batch, span)
        rows["hash"] = np.frombuffer(hashes, "<u8").reshape(-1, 2)
        rows["location"] = [pack_location(span_number, document.location) for document in batch]
        rows["num_bytes"] = num_bytes
        rows["num_tokens"] = lengths
        heldout = is_heldout(rows, self._job)
        if heldout.any():
            is_heldout_token = np.repeat(heldout, lengths)
            self._tokens["heldout"].append(tokens[is_heldout_token])
            tokens = tokens[~is_heldout_token]
        self._tokens["train"].append(tokens)
        self._rows.append(rows)
        self._num_documents += len(rows)
        self._num_tokens += int(lengths.sum())
        if self._num_tokens >= BLOCK_TOKENS or self._num_documents >= BLOCK_DOCUMENTS:
            self._write()

    def leave_out(self, found: LeftOut, span: SourceSpan) -> None:
        """Counts a dropped document."""
        example = describe_location(span.file, found.location)
        dropped = Dropped(num_documents=1, num_bytes=found.num_bytes, examples=[example])
        self._dropped = merge_dropped((self._dropped, {found.reason: dropped}))

    def finish(self) -> PieceResult:
        """Writes the last block and returns all counts."""
        if self._rows:
            self._write()
        return PieceResult(blocks=tuple(self._written), dropped=self._dropped)

    def _begin(self) -> None:
        self._rows: list[Rows] = []
        self._tokens: dict[SplitName, list[npt.NDArray[np.unsignedinteger]]]
        self._tokens = {"train": [], "heldout": []}
        self._num_documents = self._num_tokens = 0

    def _write(self) -> None:
        rows = np.concatenate(self._rows)
        number = len(self._written)
        counts = write_block(self._job, self._piece_id, number, rows, self._tokens)
        self._written.append(counts)
        self._begin()


def _encode(
    tokenizer: Tokenizer, batch: Sequence[Document] | Sequence[TokenDocument], span: SourceSpan
) -> tuple[bytes, list[int], npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]:
    """Returns the documents' hashes and sizes, their concatenated tokens, and token counts."""
    texts = [document.text for document in batch if isinstance(document, Document)]
    if texts:
        contents = [text.encode() for text in texts]
        tokens, lengths = tokenizer.encode_documents(texts)
    else:
        arrays = [_ended(document, tokenizer, span) for document in batch]  # type: ignore[arg-type]
        contents = [array.tobytes() for array in arrays]
        tokens = np.concatenate(arrays).astype(tokenizer.dtype)
        lengths = np.array([len(array) for array in arrays], np.int64)
    hashes = b"".join(blake3.blake3(content).digest(length=16) for content in contents)
    return hashes, [len(content) for content in contents], tokens, lengths


def _ended(
    document: TokenDocument, tokenizer: Tokenizer, span: SourceSpan
) -> npt.NDArray[np.integer]:
    """Returns a document's tokens with exactly one end-of-document token at the end."""
    tokens = document.tokens
    unknown = tokens[(tokens < 0) | (tokens >= tokenizer.vocab_size)]
    if len(unknown):
        raise DataError(
            f"{describe_location(span.file, document.location)}: token {unknown[0]} is not in the "
            f"vocabulary of {tokenizer.vocab_size:,}; name the tokenizer that made this file"
        )
    tokens = tokens.astype(np.uint32)
    if tokens[-1] == tokenizer.end_of_document:
        return tokens
    return np.append(tokens, np.uint32(tokenizer.end_of_document))


def train_tokenizer(config: TokenizerConfig, progress: Progress | None = None) -> Tokenizer:
    """Trains byte-level BPE, writes its tokenizer.json and returns it."""
    out = pathlib.Path(config.out)
    if out.is_dir():
        raise UsageError(f"--out {config.out} is a directory; name a file in it: tokenizer.json")
    reading = reading_options(config)
    pieces = plan_pieces(find_files(config.sources).files, reading)
    step = max(1, sum(piece.num_bytes for piece in pieces) // config.sample_bytes)
    texts = _texts(pieces[::step], reading, config.sample_bytes, progress)
    first = next(texts, None)
    if first is None:
        raise DataError(
            f"{', '.join(config.sources)}: no documents to train on; check --field and --separator"
        )
    json = train_bpe(itertools.chain([first], texts), config.vocab_size)
    open_storage(out.parent).write(out.name, json.encode())
    return Tokenizer(json)


def _texts(
    pieces: Sequence[SourcePiece],
    reading: ReadOptions,
    most_characters: int,
    progress: Progress | None,
) -> Iterator[str]:
    """Yields the documents of pieces, up to about `most_characters`."""
    done, total = 0, sum(piece.num_bytes for piece in pieces)
    num_characters = 0
    for piece in pieces:
        for span in piece.spans:
            for found in read_span(span, reading):
                if isinstance(found, Document):
                    num_characters += len(found.text)
                    yield found.text
                    if num_characters >= most_characters:
                        return
        done += piece.num_bytes
        if progress is not None:
            progress(done, total)
