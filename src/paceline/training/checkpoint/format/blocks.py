"""Verified reads of checkpoint files: bytes are returned only if they match their digests."""

import blake3

from paceline.core.errors import TruncatedError
from paceline.data.storage import Storage
from paceline.training.checkpoint.errors import REMEDY, DamagedCheckpointError, cannot_read
from paceline.training.checkpoint.format.manifest import ChunkEntry, Manifest, num_elements
from paceline.training.checkpoint.format.shard_file import ITEM_BYTES


def read_chunk(
    storage: Storage, manifest: Manifest, name: str, chunk: ChunkEntry, blocks: range
) -> bytearray:
    """Returns blocks of a chunk, after verifying their digests.

    Args:
        storage: Files of the checkpoint.
        manifest: Manifest of the checkpoint.
        name: Name of the tensor.
        chunk: Chunk of the tensor.
        blocks: Consecutive blocks.
    """
    content = bytearray()
    for block in blocks:
        content += read_block(storage, manifest, name, chunk, block)
    return content


def read_block(
    storage: Storage, manifest: Manifest, name: str, chunk: ChunkEntry, block: int
) -> bytes:
    """Returns one block of a chunk; raises if it does not match its digest."""
    file = manifest.files[chunk.file]
    start, end = block_range(manifest, name, chunk, block)
    content = read_bytes(storage, file.name, start, end)
    if blake3.blake3(content).hexdigest() != chunk.blake3[block]:
        raise DamagedCheckpointError(
            f"{storage.url}/{file.name}: tensor {name!r}, saved by rank {file.rank}, is "
            f"corrupted: bytes {start} to {end} do not match their digest; {REMEDY}"
        )
    return content


def block_range(manifest: Manifest, name: str, chunk: ChunkEntry, block: int) -> tuple[int, int]:
    """Returns the start and end of a block in its file, in bytes."""
    num_bytes = num_elements(chunk) * ITEM_BYTES[manifest.tensors[name].dtype]
    start = chunk.start + block * manifest.block_bytes
    return start, min(start + manifest.block_bytes, chunk.start + num_bytes)


def verify_header(storage: Storage, manifest: Manifest, file_number: int) -> None:
    """Reads the header of a file; raises if it does not match its digest."""
    file = manifest.files[file_number]
    header = read_bytes(storage, file.name, 0, file.header_bytes)
    if blake3.blake3(header).hexdigest() != file.header_blake3:
        raise DamagedCheckpointError(
            f"{storage.url}/{file.name}: the header, saved by rank {file.rank}, is corrupted: it "
            f"does not match its digest; {REMEDY}"
        )


def wrong_sizes(storage: Storage, manifest: Manifest) -> dict[str, str]:
    """Returns a message per missing, truncated or overlong file, without reading any of them."""
    try:
        sizes = storage.sizes()
    except OSError as error:
        raise cannot_read(storage.url, error) from error
    found: dict[str, str] = {}
    for file in manifest.files:
        what = f"{storage.url}/{file.name}, saved by rank {file.rank},"
        if file.name not in sizes:
            found[file.name] = f"{what} is missing"
        elif sizes[file.name] != file.num_bytes:
            size = sizes[file.name]
            found[file.name] = f"{what} has {size:,} bytes instead of {file.num_bytes:,}"
    return found


def read_bytes(storage: Storage, name: str, start: int, end: int) -> bytes:
    """Returns a range of bytes of a file; raises if any are missing."""
    try:
        return storage.read_range(name, start, end)
    except OSError as error:
        raise cannot_read(f"{storage.url}/{name}", error) from error
    except TruncatedError as error:
        raise DamagedCheckpointError(
            f"{storage.url}/{name}: is truncated before byte {end:,}; {REMEDY}"
        ) from error
