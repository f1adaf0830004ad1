"""``paceline data``: from text files to token shards, and a look at them."""

import dataclasses
import pathlib
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from paceline.cli.output import (
    OutputOptions,
    print_json,
    require_figure,
    say,
    stdout_console,
    transfer_progress,
)
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.data.format.manifest import Manifest
    from paceline.data.storage import Storage

_Place = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR|s3://...")]
_EXCERPT_TOKENS = 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowCommand:
    """Show what a dataset holds: splits, sources, what was left out, beginnings of documents."""

    place: _Place
    """The prepared dataset."""
    split: Literal["train", "heldout"] = "train"
    """Split whose documents are shown."""
    documents: int = 3
    """Documents whose beginnings are printed."""
    context: int = 2048
    """Tokens of a training sequence, marked in the figure."""
    figure: pathlib.Path | None = None
    """Histogram of the lengths of documents, PNG or SVG."""
    output: OutputOptions

    def __post_init__(self) -> None:
        require_figure(self.figure)
        for flag, value in (("--documents", self.documents), ("--context", self.context)):
            if value < 1:
                raise UsageError(f"{flag} must be at least 1")

    def run(self) -> int:
        """Prints, and draws where that is asked for."""
        from paceline.data.format.manifest import read_manifest
        from paceline.data.inspect.lengths import document_lengths
        from paceline.data.storage import open_storage

        storage = open_storage(self.place)
        manifest = read_manifest(storage)
        if self.split not in manifest.splits:
            raise UsageError(f"{self.place} has no split {self.split!r}")
        lengths = document_lengths(storage, manifest, self.split)
        if self.output.json:
            print_json({**manifest_summary(manifest, self.place), "lengths": lengths})
        else:
            _print_summary(manifest, self.place)
            for text in _beginnings(storage, manifest, self.split, self.documents):
                sys.stdout.write(f"| {text}\n")
        if self.figure is not None:
            from paceline.reports.plots.document_lengths import plot_document_lengths

            what = f"{self.place}, {self.split}"
            plot_document_lengths(lengths, what, self.context).savefig(self.figure)
            say(str(self.figure))
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Read a dataset whole and compare it with the digests of its manifest."""

    place: _Place
    """The prepared dataset."""
    output: OutputOptions

    def run(self) -> int:
        """Prints what is wrong; exits with 1 if anything is."""
        from paceline.data.format.manifest import read_manifest
        from paceline.data.inspect.verify import verify
        from paceline.data.storage import open_storage

        storage = open_storage(self.place)
        manifest = read_manifest(storage)
        num_wrong = 0
        with transfer_progress(self.place) as progress:
            for finding in verify(storage, manifest, progress):
                num_wrong += 1
                if self.output.json:
                    print_json(finding)
                else:
                    sys.stdout.write(f"{finding}\n")
        if not num_wrong and not self.output.json:
            num_shards = sum(map(manifest.num_shards, manifest.splits))
            sys.stdout.write(f"{self.place}: {num_shards:,} shards are intact\n")
        return 1 if num_wrong else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataCommand:
    """Training data: train a tokenizer, prepare shards of tokens, look at them."""

    task: (
        Annotated[ShowCommand, tyro.conf.subcommand("show")]
        | Annotated[VerifyCommand, tyro.conf.subcommand("verify")]
    )

    def run(self) -> int:
        """Trains, prepares, shows or verifies."""
        return self.task.run()


def manifest_summary(manifest: "Manifest", place: str) -> dict[str, object]:
    """Returns what a program wants to know of a dataset, without its list of shards."""
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


def _print_summary(manifest: "Manifest", place: str) -> None:
    from paceline.reports.tables.dataset import dropped_table, splits_table

    console = stdout_console()
    console.print(splits_table(manifest, place))
    if manifest.dropped:
        console.print(dropped_table(manifest))


def _beginnings(
    storage: "Storage", manifest: "Manifest", split: Literal["train", "heldout"], number: int
) -> list[str]:
    from paceline.data.format.manifest import TOKENIZER
    from paceline.data.inspect.excerpts import document_beginnings
    from paceline.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(storage.read(TOKENIZER).decode())
    beginnings = document_beginnings(storage, manifest, split, number, _EXCERPT_TOKENS)
    return [" ".join(tokenizer.decode(tokens).split()) for tokens in beginnings]
