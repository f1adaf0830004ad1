"""Configuration of data preparation. Free of torch and NumPy: the command line imports it."""

import dataclasses
from typing import Annotated, Literal

import tyro

from paceline.core.errors import UsageError
from paceline.core.host import available_processors
from paceline.core.units import MB, MIB

Sources = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE...", name="")
]

_LARGEST_UINT32 = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Source files and how they are split into documents."""

    sources: Sources
    """Files, and directories to search recursively: text, .jsonl, .parquet, Megatron's .idx; text
    and .jsonl also compressed as .gz or .zst."""
    separator: str = "<|endoftext|>"
    r"""Separator between the documents of a text file; \n is a newline, \t a tab. A file without a
    separator is one document."""
    field: str = "text"
    """Field of JSON Lines, or column of Parquet, with the text of a document."""
    max_document_bytes: int = 16 * MIB
    """Maximum size of a document in bytes; larger ones are dropped. For a text without blanks, a
    tokenizer needs up to 150 times the memory of the text."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UsageError("name at least one file or directory to read")
        if not 1 <= self.max_document_bytes <= _LARGEST_UINT32:
            raise UsageError(
                f"--max-document-bytes {self.max_document_bytes} must be from 1 to "
                f"{_LARGEST_UINT32:,}"
            )

    @property
    def separator_bytes(self) -> bytes:
        r"""The separator as bytes in a file, with escapes replaced; empty if there is none."""
        return self.separator.replace("\\n", "\n").replace("\\t", "\t").encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig(SourceConfig):
    """Train a byte-level BPE tokenizer."""

    out: str
    """File to write, such as tokenizer.json."""
    vocab_size: int = 32_768
    """Vocabulary size, including the end-of-document token."""
    sample_bytes: int = 500 * MB
    """Approximate number of bytes to train on, sampled evenly from all sources."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_bytes < 1:
            raise UsageError(f"--sample-bytes {self.sample_bytes} must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig(SourceConfig):
    """Tokenize documents into shards."""

    tokenizer: str
    """Path of a tokenizer.json, or "bytes" for the byte vocabulary."""
    out: str
    """Directory, or s3://bucket/prefix, for the shards and their manifest."""
    heldout: float = 0.01
    """Fraction of documents in the held-out split. A hash of each document decides, so adding files
    moves no document between the splits."""
    end_of_document: str | None = None
    """Token that ends every document; by default the tokenizer's <|endoftext|>, </s> or
    similar."""
    shard_tokens: int = 2**26
    """Tokens per shard."""
    engine: Literal["local", "ray"] = "local"
    """Where the workers run: as processes on this machine, or on a Ray cluster."""
    workers: int | None = None
    """Number of parallel workers; by default, one per core of the machine or cluster."""
    ray_address: str | None = None
    """Address of the Ray cluster; by default RAY_ADDRESS, or a new cluster on this machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.heldout < 1:
            raise UsageError(f"--heldout {self.heldout} must be a fraction from 0 to below 1")
        if not 1 <= self.shard_tokens <= _LARGEST_UINT32:
            raise UsageError(
                f"--shard-tokens {self.shard_tokens} must be from 1 to {_LARGEST_UINT32:,}"
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers {self.workers} must be at least 1")
        if self.ray_address is not None and self.engine != "ray":
            raise UsageError("--ray-address needs --engine ray")

    @property
    def num_local_workers(self) -> int:
        """Number of worker processes of the local engine."""
        return available_processors() if self.workers is None else self.workers
