"""The source files of documents, and their bytes in chunks; a suffix determines a file's kind.

Size and modification time are stored when a file is found and checked again before and after it is
read. A corpus that changes while it is read is an error that names the file, and so is a file that
is truncated, or that expands far more than text does.
"""

import gzip
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Literal, get_args

import msgspec

from paceline.core.errors import DataError, UsageError
from paceline.core.units import GIB, MIB, format_binary_bytes

Kind = Literal["text", "jsonl", "parquet", "megatron"]
Compression = Literal["gzip", "zstd"]

_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".idx": "megatron",
    **dict.fromkeys(
        # Prose and markup, then source code.
        (
            *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv"),
            *(".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts"),
        ),
        "text",
    ),
}
assert set(_KINDS.values()) == set(get_args(Kind))


class FoundFile(msgspec.Struct, frozen=True, kw_only=True):
    """A source file and its state when it was found."""

    name: str
    """The path as the user wrote it."""
    path: str
    """The absolute path, for workers with another working directory."""
    num_bytes: int
    modified_ns: int
    kind: Kind
    compression: Compression | None

    def require_unchanged(self) -> None:
        """Raises a `DataError` if the file has changed since it was found."""
        try:
            num_bytes, modified_ns = _state(pathlib.Path(self.path), self.kind)
        except OSError as error:
            raise DataError(f"{self.name}: {error.strerror} while it was being prepared") from error
        if (num_bytes, modified_ns) != (self.num_bytes, self.modified_ns):
            raise DataError(
                f"{self.name} changed while it was being prepared: it had {self.num_bytes:,} "
                f"bytes and has {num_bytes:,}; run the command again when nothing writes to the "
                "file"
            )


class FoundFiles(msgspec.Struct, frozen=True, kw_only=True):
    """All files of the sources, in the order in which their documents are read."""

    files: tuple[FoundFile, ...]
    unknown: tuple[tuple[str, int], ...]
    """Names and sizes of files in directories that have an unknown suffix."""
    outside: tuple[tuple[str, int], ...] = ()
    """Names and sizes of symbolic links in directories that lead out of them; they are not read."""


def find_files(sources: Iterable[str], except_below: str | None = None) -> FoundFiles:
    """Returns the files of the sources, sorted by name; a file that occurs twice is read once.

    Args:
        sources: Files, and directories to search recursively.
        except_below: A directory to skip: the output directory.
    """
    except_path = None if except_below is None else pathlib.Path(except_below).resolve()
    files: dict[str, FoundFile] = {}
    unknown: dict[str, int] = {}
    outside: dict[str, int] = {}
    for source in sources:
        if "://" in source:
            raise UsageError(f"{source}: sources must be files or directories; download it first")
        path = pathlib.Path(source)
        if not path.exists():
            raise UsageError(f"{source}: no such file or directory")
        is_directory = path.is_dir()
        if not is_directory and not path.is_file():
            raise UsageError(f"{source}: neither a file nor a directory")
        for each in _walk(path, except_path) if is_directory else (path,):
            if is_directory and _leads_out(each, path):
                outside[str(each)] = each.stat().st_size
                continue
            found = _describe(each, is_named=not is_directory)
            if isinstance(found, FoundFile):
                files.setdefault(found.path, found)
            elif found is not None:
                unknown[str(each)] = found
    if not files and outside:
        raise UsageError(
            f"{', '.join(sources)}: {next(iter(outside))} and {len(outside) - 1} other files are "
            "links that lead out of the directory, and are not read; name the files themselves"
        )
    if not files:
        raise UsageError(
            f"{', '.join(sources)}: no file of a known kind; known are {' '.join(_KINDS)}, and "
            f"{' '.join(_COMPRESSIONS)} of text; a file that you name directly is read as text"
        )
    return FoundFiles(
        files=tuple(sorted(files.values(), key=lambda file: (file.name, file.path))),
        unknown=tuple(sorted(unknown.items())),
        outside=tuple(sorted(outside.items())),
    )


def _walk(directory: pathlib.Path, except_path: pathlib.Path | None) -> Iterator[pathlib.Path]:
    """Yields the files below a directory; skips hidden files and directories."""
    for folder, folders, names in os.walk(directory):
        if except_path is not None and pathlib.Path(folder).resolve() == except_path:
            folders.clear()
            continue
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in names:
            path = pathlib.Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _leads_out(path: pathlib.Path, directory: pathlib.Path) -> bool:
    """Returns whether a file is a link to one outside; a corpus may come from somebody else."""
    return path.is_symlink() and not path.resolve().is_relative_to(directory.resolve())


def _describe(path: pathlib.Path, *, is_named: bool) -> FoundFile | int | None:
    """Returns a file's description, its size if of unknown kind, None if it is not a source."""
    name = str(path)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name!r}: the file's name is not UTF-8; rename it") from error
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    compression = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression is not None:
        suffixes.pop()
    kind = _KINDS.get(suffixes[-1]) if suffixes else None
    if kind is None and suffixes[-1:] == [".bin"] and path.with_suffix(".idx").exists():
        if is_named:
            raise UsageError(f"{name}: name its index {path.with_suffix('.idx')} instead")
        return None
    if kind is None and is_named:
        kind = "text"
    if compression is not None and kind in ("parquet", "megatron"):
        raise UsageError(f"{name}: {kind} files are not read compressed; decompress it")
    if kind is None:
        return path.stat().st_size
    if not os.access(path, os.R_OK):
        raise UsageError(f"{name}: no permission to read it")
    try:
        num_bytes, modified_ns = _state(path, kind)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}: {error.filename}") from error
    return FoundFile(
        name=name,
        path=str(path.absolute()),
        num_bytes=num_bytes,
        modified_ns=modified_ns,
        kind=kind,
        compression=compression,
    )


def _state(path: pathlib.Path, kind: Kind) -> tuple[int, int]:
    """Returns size and modification time; for a Megatron index, together with its .bin."""
    paths = (path, path.with_suffix(".bin")) if kind == "megatron" else (path,)
    states = [each.stat() for each in paths]
    return sum(each.st_size for each in states), max(each.st_mtime_ns for each in states)


CHUNK_BYTES = MIB
MOST_EXPANSION = 200
"""Maximum expansion ratio of a compressed file; text rarely reaches 10."""
HARMLESS_BYTES = GIB
"""Decompressed size up to which any expansion is accepted."""

_ZSTD_INPUT_BYTES = 1024
"""Input bytes per call to zstd: in the worst case, 4 bytes expand to 128 KiB."""
_ZSTD_WINDOW_BYTES = 128 * MIB


def read_chunks(file: FoundFile, start: int = 0) -> Iterator[bytes]:
    """Yields the bytes of a file from `start`; for a compressed file, all decompressed bytes."""
    try:
        with pathlib.Path(file.path).open("rb") as opened:
            if file.compression is None:
                opened.seek(start)
                while chunk := opened.read(CHUNK_BYTES):
                    yield chunk
                return
            decompress = _gzip_chunks if file.compression == "gzip" else _zstd_chunks
            num_bytes = 0
            for chunk in decompress(opened, file.name):
                num_bytes += len(chunk)
                require_sane(file, num_bytes)
                yield chunk
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read: {error.strerror or error}") from error


def _gzip_chunks(opened: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=opened) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except EOFError as error:
        raise _truncated(name, "gzip") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(name, "gzip", error) from error


def _zstd_chunks(opened: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{name}: zstd needs the package zstandard; pip install 'paceline[zstd]'"
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = decompressor.decompressobj()
    is_between = True
    try:
        while content := opened.read(_ZSTD_INPUT_BYTES):
            while content:
                is_between = False
                if chunk := frame.decompress(content):
                    yield chunk
                content = b""
                if frame.eof:  # Another frame may follow.
                    content, frame = frame.unused_data, decompressor.decompressobj()
                    is_between = True
    except zstandard.ZstdError as error:
        raise _damaged(name, "zstd", error) from error
    if not is_between:
        raise _truncated(name, "zstd")


def require_sane(file: FoundFile, num_bytes: int, harmless: int | None = None) -> None:
    """Raises an error if a file has expanded to more bytes than text does."""
    harmless = HARMLESS_BYTES if harmless is None else harmless
    if num_bytes > max(harmless, MOST_EXPANSION * file.num_bytes):
        raise DataError(
            f"{file.name}: {format_binary_bytes(file.num_bytes)} that expand to more than "
            f"{format_binary_bytes(num_bytes)}, over {MOST_EXPANSION} times as much: not text; "
            "leave it out, or decompress it first"
        )


def _truncated(name: str, what: str) -> DataError:
    return DataError(
        f"{name}: truncated: the file ends before its {what} data does; fetch it again"
    )


def _damaged(name: str, what: str, error: Exception) -> DataError:
    return DataError(f"{name}: damaged {what} data: {error}; fetch it again")
