"""Trains a tokenizer on an even sample of the sources."""

import pathlib
from collections.abc import Iterator, Sequence

from paceline.core.errors import DataError, UsageError
from paceline.core.units import Progress
from paceline.data.prepare.config import TokenizerConfig
from paceline.data.prepare.job import reading_options
from paceline.data.prepare.tokenize import SourcePiece, plan_pieces
from paceline.data.sources.documents import Document
from paceline.data.sources.files import find_files
from paceline.data.sources.read import ReadOptions, read_span
from paceline.data.storage import open_storage
from paceline.data.tokenizer import Tokenizer, train_bpe


def train_tokenizer(config: TokenizerConfig, progress: Progress | None = None) -> Tokenizer:
    """Trains byte-level BPE, writes its tokenizer.json and returns it."""
    out = pathlib.Path(config.out)
    if out.is_dir():
        raise UsageError(f"--out {config.out} is a directory; name a file in it: tokenizer.json")
    reading = reading_options(config)
    pieces = _sample(plan_pieces(find_files(config.sources).files, reading), config.sample_bytes)
    documents = _Documents(pieces, reading, config.sample_bytes, progress)
    json = train_bpe(iter(documents), config.vocab_size)
    if not documents.num_documents:
        raise DataError(
            f"{', '.join(config.sources)}: no documents to train on; check --field and --separator"
        )
    open_storage(out.parent).write(out.name, json.encode())
    return Tokenizer(json)


def _sample(pieces: Sequence[SourcePiece], sample_bytes: int) -> list[SourcePiece]:
    """Returns every n-th piece, so that about `sample_bytes` bytes remain."""
    total = sum(piece.num_bytes for piece in pieces)
    step = max(1, total // sample_bytes)
    return list(pieces[::step])


class _Documents:
    """The texts of some pieces, up to about `sample_bytes` characters."""

    def __init__(
        self,
        pieces: Sequence[SourcePiece],
        reading: ReadOptions,
        sample_bytes: int,
        progress: Progress | None,
    ) -> None:
        self.num_documents = 0
        self._pieces = pieces
        self._reading = reading
        self._sample_bytes = sample_bytes
        self._progress = progress

    def __iter__(self) -> Iterator[str]:
        done = 0
        total = sum(piece.num_bytes for piece in self._pieces)
        num_characters = 0
        for piece in self._pieces:
            for span in piece.spans:
                for found in read_span(span, self._reading):
                    if not isinstance(found, Document):
                        continue
                    self.num_documents += 1
                    num_characters += len(found.text)
                    yield found.text
                    if num_characters >= self._sample_bytes:
                        return
            done += piece.num_bytes
            if self._progress is not None:
                self._progress(done, total)
