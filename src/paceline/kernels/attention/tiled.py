"""FlashAttention-2 (Dao 2023) in plain PyTorch: attention by tiles, on any device.

Forward iterates over tiles of keys with a running maximum and sum per query, so that at most one
tile of scores exists at a time; only the log-sum-exp of each query is kept. Backward recomputes a
tile's probabilities from it. Memory beyond the results is two tiles and, for bf16 and fp16, copies
of a few heads' keys and values: it grows linearly with the sequence.

A tile spans several heads of a sequence, so that each operation on it has enough work. It ends at
the last key that any of its queries sees, so that work above the diagonal is skipped rather than
masked. bf16 and fp16 are computed in float32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.attention.layout import (
    BackwardInputs,
    ForwardInputs,
    Gradients,
    Results,
    empty_gradients,
    empty_lse,
    empty_output,
)

# The fastest of the tile sizes tried, on CPUs with 2 MiB of cache per core.
_TILE_HEADS = 8
_TILE_QUERIES = 256
_TILE_SCORES = 2**20


class Tile(NamedTuple):
    """A block of queries and keys, as half-open ranges."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int


def plan_tiles(
    num_queries: int, num_keys: int, num_heads: int, diagonal: int | None
) -> Iterator[list[Tile]]:
    """Yields the tiles of visible keys for each tile of queries that see any key."""
    first_seeing = 0 if diagonal is None else max(0, -diagonal)
    for first_query in range(first_seeing, num_queries, _TILE_QUERIES):
        end_query = min(first_query + _TILE_QUERIES, num_queries)
        end_visible = num_keys if diagonal is None else min(num_keys, end_query + diagonal)
        span = max(_TILE_SCORES // (num_heads * _TILE_QUERIES), 1)
        yield [
            Tile(first_query, end_query, first_key, min(first_key + span, end_visible))
            for first_key in range(0, end_visible, span)
        ]


def tiled_forward(inputs: ForwardInputs) -> Results:
    """Returns the output and the log-sum-exp of each query's scores."""
    output = empty_output(inputs.query)
    lse = empty_lse(inputs.query, "tiled")
    if inputs.diagonal is not None and inputs.diagonal < 0:
        output[..., : -inputs.diagonal, :] = 0
        lse[..., : -inputs.diagonal] = float("-inf")
    for part in _parts(inputs.query, inputs.key, inputs.value, output, lse.unsqueeze(-1)):
        _forward_part(part, inputs.diagonal, inputs.scale)
    return output, lse


def _forward_part(part: tuple[Tensor, ...], diagonal: int | None, scale: float) -> None:
    query, key, value, output, lse = part
    key, value = key.to(lse.dtype), value.to(lse.dtype)
    workspace = _empty_tile(query, key)
    for tiles in plan_tiles(query.shape[1], key.shape[1], query.shape[0], diagonal):
        rows = slice(tiles[0].first_query, tiles[0].end_query)
        queries = _grouped(query[:, rows], key) * scale
        largest = queries.new_full((*queries.shape[:-1], 1), float("-inf"))
        total = torch.zeros_like(largest)
        mixed = torch.zeros_like(queries)
        for tile in tiles:
            keys = slice(tile.first_key, tile.end_key)
            scores = _tile_of(workspace, queries, tile)
            torch.bmm(queries, key[:, keys].transpose(1, 2), out=scores)
            _hide(scores, tile, diagonal)
            # Every query here sees the first key, so the maximum is finite from the first tile on.
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            correction = largest.sub_(new_largest).exp_()
            largest = new_largest
            weights = scores.sub_(largest).exp_()
            total.mul_(correction).add_(weights.sum(-1, keepdim=True))
            mixed.mul_(correction).baddbmm_(weights, value[:, keys])
        output[:, rows] = _ungrouped(mixed.div_(total), query)
        lse[:, rows] = _ungrouped(total.log_().add_(largest), query)


def tiled_backward(inputs: BackwardInputs) -> Gradients:
    """Returns the gradients of query, key and value."""
    gradients = empty_gradients(inputs.query, inputs.key, inputs.value)
    if inputs.diagonal is not None and inputs.diagonal < 0:
        gradients[0][..., : -inputs.diagonal, :] = 0
    lse_gradient = inputs.lse_gradient
    if lse_gradient is None:
        lse_gradient = inputs.lse.new_zeros(()).expand_as(inputs.lse)
    parts = _parts(
        *(inputs.query, inputs.key, inputs.value, inputs.output, inputs.output_gradient),
        *(inputs.lse.unsqueeze(-1), lse_gradient.unsqueeze(-1), *gradients),
    )
    for part in parts:
        _backward_part(part, inputs.diagonal, inputs.scale)
    return gradients


def _backward_part(part: tuple[Tensor, ...], diagonal: int | None, scale: float) -> None:
    query, key, value, output, output_gradient, lse, lse_gradient, *part_gradients = part
    query_gradient, key_gradient, value_gradient = part_gradients
    key, value = key.to(lse.dtype), value.to(lse.dtype)
    key_sum = key_gradient.zero_().to(lse.dtype)
    value_sum = value_gradient.zero_().to(lse.dtype)
    workspaces = _empty_tile(query, key), _empty_tile(query, key)
    for tiles in plan_tiles(query.shape[1], key.shape[1], query.shape[0], diagonal):
        rows = slice(tiles[0].first_query, tiles[0].end_query)
        queries = _grouped(query[:, rows], key) * scale
        gradients = _grouped(output_gradient[:, rows], key)
        minus_lse = -_grouped(lse[:, rows], key)
        # A score's gradient is its probability times (the probability's gradient minus the row's
        # mean); the mean is the sum over the head of output times its gradient.
        minus_mean = _grouped(lse_gradient[:, rows], key) - (
            gradients * _grouped(output[:, rows], key)
        ).sum(-1, keepdim=True)
        query_sum = torch.zeros_like(queries)
        for tile in tiles:
            keys = slice(tile.first_key, tile.end_key)
            scores = _tile_of(workspaces[0], queries, tile)
            torch.baddbmm(minus_lse, queries, key[:, keys].transpose(1, 2), out=scores)
            _hide(scores, tile, diagonal)
            weights = scores.exp_()
            value_sum[:, keys].baddbmm_(weights.transpose(1, 2), gradients)
            changes = _tile_of(workspaces[1], queries, tile)
            torch.baddbmm(minus_mean, gradients, value[:, keys].transpose(1, 2), out=changes)
            changes.mul_(weights)
            key_sum[:, keys].baddbmm_(changes.transpose(1, 2), queries)
            query_sum.baddbmm_(changes, key[:, keys])
        query_gradient[:, rows] = _ungrouped(query_sum.mul_(scale), query)
    key_gradient.copy_(key_sum)
    value_gradient.copy_(value_sum)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tensors of a few heads at a time; the second tensor has the key-value heads."""
    if tensors[0].shape[1] == 1:
        # Sequences with a single head are processed together, as if they were heads.
        tensors = tuple(tensor.transpose(0, 1) for tensor in tensors)
    num_kv_heads = tensors[1].shape[1]
    group = tensors[0].shape[1] // num_kv_heads
    num_together = max(1, _TILE_HEADS // group)
    for sequence in zip(*tensors, strict=True):
        for first in range(0, num_kv_heads, num_together):
            yield tuple(
                tensor.unflatten(0, (num_kv_heads, -1))[first : first + num_together].flatten(0, 1)
                for tensor in sequence
            )


def _grouped(rows: Tensor, key: Tensor) -> Tensor:
    """Concatenates the queries of all heads that share a key head."""
    return rows.reshape(key.shape[0], -1, rows.shape[-1]).to(key.dtype)


def _ungrouped(rows: Tensor, query: Tensor) -> Tensor:
    return rows.view(query.shape[0], -1, rows.shape[-1])


def _empty_tile(query: Tensor, key: Tensor) -> Tensor:
    """Allocates memory for the largest tile of these queries and keys."""
    num_rows = query.shape[0] * min(query.shape[1], _TILE_QUERIES)
    num_keys = max(1, min(key.shape[1], _TILE_SCORES // (query.shape[0] * _TILE_QUERIES)))
    return key.new_empty(num_rows * num_keys)


def _tile_of(workspace: Tensor, queries: Tensor, tile: Tile) -> Tensor:
    shape = (*queries.shape[:-1], tile.end_key - tile.first_key)
    return workspace[: shape[0] * shape[1] * shape[2]].view(shape)


def _hide(scores: Tensor, tile: Tile, diagonal: int | None) -> None:
    """Sets the scores that queries of the tile must not see to -inf."""
    if diagonal is None or tile.first_query + diagonal >= tile.end_key - 1:
        return
    num_queries = tile.end_query - tile.first_query
    first_hidden = max(0, tile.first_query + diagonal + 1 - tile.first_key)
    partly = scores.view(-1, num_queries, scores.shape[-1])[..., first_hidden:]
    hidden = torch.ones(partly.shape[1:], dtype=torch.bool, device=scores.device)
    partly.masked_fill_(
        hidden.triu_(tile.first_query + diagonal + 1 - tile.first_key - first_hidden), float("-inf")
    )
