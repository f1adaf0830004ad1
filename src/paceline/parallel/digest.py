"""Hashes of the bits of tensors, at the speed of memory.

64-bit words are summed by row, and the row sums are summed with odd multipliers, all modulo 2^64. A
flipped bit changes one word by a power of two, and an odd multiple of that is not zero. Any single
flip, and any number of flips in one word, therefore changes the hash. It detects accidents; it does
not resist deliberate collisions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD_BYTES = 8
_ROW_WORDS = 4096
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Odd number without structure, as int64: 2^64 divided by the golden ratio."""


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Returns the hash of a tensor's bits as one int64 on its device, without synchronizing."""
    flat = tensor.detach().contiguous().reshape(-1)
    words, rest = _words(flat)
    num_rows = len(words) // _ROW_WORDS
    sums = [rest.to(torch.int64), words[num_rows * _ROW_WORDS :]]
    if num_rows:
        sums.append(words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS).sum(1))
    return combined(torch.cat(sums))


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the hashes of several tensors."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([digest(tensor) for tensor in tensors]).to(device)


def _words(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a flat tensor as 64-bit words, and the bytes before and after them.

    Words must be aligned to their size, but views into a flat buffer may not be.
    """
    content = flat.view(torch.uint8)
    before = -content.storage_offset() % _WORD_BYTES
    if len(content) < before + _WORD_BYTES:
        return content.new_empty(0, dtype=torch.int64), content
    end = before + (len(content) - before) // _WORD_BYTES * _WORD_BYTES
    rest = torch.cat([content[:before], content[end:]])
    return content[before:end].view(torch.int64), rest


def combined(values: Tensor) -> Tensor:
    """Returns one hash of several, in which their order counts."""
    multipliers = torch.arange(1, 2 * len(values) + 1, 2, device=values.device) * _GOLDEN
    return (values * multipliers).sum()
