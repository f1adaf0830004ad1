"""``paceline data``: prepares token shards from text files, and inspects them."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from paceline.cli.output import FigurePath, Flat, OutputOptions, Place, say, transfer_progress
from paceline.core.errors import UsageError
from paceline.data.prepare.config import PrepareConfig, TokenizerConfig

if TYPE_CHECKING:
    from paceline.data.manifest import DatasetManifest
    from paceline.data.storage import Storage
    from paceline.reports.tables.table import Table

_EXCERPT_TOKENS = 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerCommand:
    """Train a byte-level BPE tokenizer on documents."""

    config: Flat[TokenizerConfig]
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Trains, writes tokenizer.json, and prints the vocabulary size."""
        from paceline.data.prepare.tokenize import train_tokenizer

        with transfer_progress("reading") as progress:
            tokenizer = train_tokenizer(self.config, progress)
        row = {"out": self.config.out, "vocab_size": tokenizer.vocab_size}
        self.output.show([row], f"{self.config.out}: {tokenizer.vocab_size:,} tokens")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareCommand:
    """Tokenize documents into shards; after a crash, run the same command again to resume."""

    config: Flat[PrepareConfig]
    output: Flat[OutputOptions]

    def run(self) -> int:
        """Prepares the dataset and prints a summary."""
        from paceline.data.prepare.run import find_prepared, prepare

        manifest = find_prepared(self.config)
        if manifest is not None:
            say(f"paceline: {self.config.out} is already prepared; nothing to do")
        else:
            with transfer_progress("tokenizing") as progress:
                manifest = prepare(self.config, progress)
        summary = manifest_summary(manifest, self.config.out)
        self.output.show([summary], *_tables(manifest, self.config.out))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write a split in Megatron's format, PREFIX.bin and PREFIX.idx."""

    place: Place
    """The prepared dataset."""
    out: pathlib.Path
    """PREFIX: path of the two files without .bin and .idx."""
    split: Literal["train", "heldout"] = "train"
    """Split to write."""
    output: OutputOptions

    def run(self) -> int:
        """Writes the two files and prints their names."""
        from paceline.data.manifest import read_manifest
        from paceline.data.megatron import write_megatron
        from paceline.data.storage import open_storage

        storage = open_storage(self.place)
        write_megatron(storage, read_manifest(storage), self.split, self.out)
        written = [f"{self.out}.bin", f"{self.out}.idx"]
        self.output.show([{"written": written}], *written)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowCommand:
    """Show what is in a dataset: splits, sources, dropped documents, beginnings of documents."""

    place: Place
    """The prepared dataset."""
    split: Literal["train", "heldout"] = "train"
    """Split whose documents are shown."""
    documents: int = 3
    """Number of documents whose beginning is printed."""
    context: int = 2048
    """Context length in tokens, marked in the figure."""
    figure: FigurePath | None = None
    """Also draw a histogram of document lengths: a file that ends in .png or .svg."""
    output: OutputOptions

    def __post_init__(self) -> None:
        for flag, value in (("--documents", self.documents), ("--context", self.context)):
            if value < 1:
                raise UsageError(f"{flag} must be at least 1")

    def run(self) -> int:
        """Prints a summary and excerpts, and draws the figure if requested."""
        from paceline.data.inspect import document_lengths
        from paceline.data.manifest import read_manifest
        from paceline.data.storage import open_storage

        storage = open_storage(self.place)
        manifest = read_manifest(storage)
        if self.split not in manifest.splits:
            raise UsageError(f"{self.place} has no split {self.split!r}")
        lengths = document_lengths(storage, manifest, self.split)
        row = {**manifest_summary(manifest, self.place), "lengths": lengths}
        texts = []
        if not self.output.json:
            texts = _beginnings(storage, manifest, self.split, self.documents)
        self.output.show([row], *_tables(manifest, self.place), *texts)
        if self.figure is not None:
            from paceline.reports.plots.training_run import plot_document_lengths

            what = f"{self.place}, {self.split}"
            plot_document_lengths(lengths, what, self.context).savefig(self.figure)
            say(str(self.figure))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Read an entire dataset and check it against the digests in its manifest."""

    place: Place
    """The prepared dataset."""
    output: OutputOptions

    def run(self) -> int:
        """Prints findings; returns 1 if there are any."""
        from paceline.data.inspect import verify
        from paceline.data.manifest import read_manifest
        from paceline.data.storage import open_storage

        storage = open_storage(self.place)
        manifest = read_manifest(storage)
        with transfer_progress(self.place) as progress:
            num_wrong = self.output.findings(verify(storage, manifest, progress))
        if not num_wrong:
            num_shards = sum(map(manifest.num_shards, manifest.splits))
            self.output.show((), f"{self.place}: {num_shards:,} shards are intact")
        return 1 if num_wrong else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditCommand:
    """Check that a run trained on every sample of its data stream exactly once."""

    run_directory: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Directory of a run of paceline train."""
    output: OutputOptions

    def run(self) -> int:
        """Re-reads the samples and prints findings; returns 1 if there are any."""
        from paceline.training.run_directory import audit_run

        num_steps, findings = audit_run(self.run_directory)
        num_wrong = self.output.findings(findings)
        if not num_wrong:
            text = f"{self.run_directory}: {num_steps:,} steps, every sample exactly once"
            self.output.show((), text)
        return 1 if num_wrong else 0


def manifest_summary(manifest: "DatasetManifest", place: str) -> dict[str, object]:
    """Returns a summary of a dataset for JSON output, without its list of shards."""
    return {
        "place": place,
        "fingerprint": manifest.fingerprint,
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
        "shard_tokens": manifest.shard_tokens,
        "num_files": len(manifest.sources),
        "num_source_bytes": manifest.num_source_bytes,
        "dropped": manifest.dropped,
        "splits": {
            name: {
                "num_shards": manifest.num_shards(name),
                "num_documents": split.num_documents,
                "num_tokens": split.num_tokens,
            }
            for name, split in manifest.splits.items()
        },
    }


def _tables(manifest: "DatasetManifest", place: str) -> "list[Table]":
    from paceline.reports.tables.training_run import dropped_table, splits_table

    dropped = [dropped_table(manifest)] if manifest.dropped else []
    return [splits_table(manifest, place), *dropped]


def _beginnings(
    storage: "Storage", manifest: "DatasetManifest", split: Literal["train", "heldout"], number: int
) -> list[str]:
    from paceline.data.inspect import document_beginnings
    from paceline.data.manifest import TOKENIZER
    from paceline.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(storage.read(TOKENIZER).decode(), manifest.end_of_document)
    beginnings = document_beginnings(storage, manifest, split, number, _EXCERPT_TOKENS)
    return [f"| {' '.join(tokenizer.decode(tokens).split())}" for tokens in beginnings]
