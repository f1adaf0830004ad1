"""Documents from Parquet files, by row group and in batches of bounded size."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.core.errors import DataError, UsageError
from paceline.core.units import MIB
from paceline.data.sources.documents import TOO_LONG, Found, LeftOut, missing_field, text_document
from paceline.data.sources.files import FoundFile

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile


_BATCH_BYTES = 4 * MIB
_MOST_ROWS = 4096


def row_group_bytes(file: FoundFile, field: str) -> list[int]:
    """Returns the bytes of text in each row group, from the footer of the file."""
    with _opened(file) as opened:
        column = _column(opened, file, field)
        metadata = opened.metadata
        return [
            metadata.row_group(group).column(column).total_uncompressed_size
            for group in range(metadata.num_row_groups)
        ]


def parquet_documents(
    file: FoundFile, start: int, end: int, field: str, most_bytes: int
) -> Iterator[Found]:
    """Yields the rows of a range of row groups."""
    with _opened(file) as opened:
        import pyarrow

        column = _column(opened, file, field)
        metadata = opened.metadata
        row = sum(metadata.row_group(group).num_rows for group in range(start))
        for group in range(start, end):
            num_rows = metadata.row_group(group).num_rows
            num_bytes = metadata.row_group(group).column(column).total_uncompressed_size
            batch_rows = num_rows * _BATCH_BYTES // max(1, num_bytes)
            for batch in opened.iter_batches(
                batch_size=min(_MOST_ROWS, max(1, batch_rows)),
                row_groups=[group],
                columns=[field],
                use_threads=False,
            ):
                # Read as bytes: Parquet requires UTF-8 but does not validate it.
                for content in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    if content is None:
                        yield LeftOut(row, missing_field(field), 0)
                    elif len(content) > most_bytes:
                        yield LeftOut(row, TOO_LONG, len(content))
                    else:
                        yield text_document(row, content)
                    row += 1


@contextlib.contextmanager
def _opened(file: FoundFile) -> "Iterator[ParquetFile]":
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{file.name}: Parquet needs the package pyarrow; pip install 'paceline[parquet]'"
        ) from error
    try:
        # Buffered, because a row group may be larger than memory.
        with ParquetFile(file.path, buffer_size=MIB, pre_buffer=False) as opened:
            yield opened
    except (pyarrow.ArrowException, OSError) as error:
        first_line = str(error).partition("\n")[0]
        raise DataError(f"{file.name}: truncated or damaged Parquet: {first_line}") from error


def _column(opened: "ParquetFile", file: FoundFile, field: str) -> int:
    """Returns the index of the text column."""
    import pyarrow

    schema = opened.schema_arrow
    index = schema.get_field_index(field)
    if index < 0:
        raise UsageError(
            f"{file.name}: no column {field!r}; it has {', '.join(schema.names)}: name one "
            "with --field"
        )
    kind = schema.field(index).type
    is_text = (
        pyarrow.types.is_string(kind)
        or pyarrow.types.is_large_string(kind)
        or pyarrow.types.is_binary(kind)
        or pyarrow.types.is_large_binary(kind)
    )
    if not is_text:
        raise UsageError(f"{file.name}: column {field!r} contains {kind}, not text")
    # Nested fields are several columns in the file, so the index is looked up by path.
    paths = [opened.schema.column(i).path for i in range(len(opened.schema))]
    return paths.index(field)
