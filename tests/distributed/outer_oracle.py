"""What a program of an outer loop must end with, in NumPy and in one process, to the last bit.

It has its own layout of fragments, its own codes and its own outer optimizer. Only the rounding to
bf16 is torch's.
"""

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.distributed.outer_programs import RATE, Program

_BLOCK = 256
Floats = NDArray[np.float32]


def expected(program: Program) -> list[list[list[Tensor]]]:
    """Returns by rank what it holds of each parameter after each step, and at the end."""
    sites = [_SiteModel(program, site) for site in range(program.num_sites)]
    for site in sites[1:]:
        site.values = [value.clone() for value in sites[0].values]
    fragments = [
        _Fragment(program, numbers, place, sites[0])
        for numbers in _fragments(program)
        for place in range(program.site_ranks)
    ]
    seen: list[list[list[Tensor]]] = [[] for _ in range(program.num_sites * program.site_ranks)]
    for step in range(1, program.steps + 1):
        for site in sites:
            site.step(step)
        for fragment in fragments:
            for site in sites:
                site.receive(fragment, step)
        for fragment in fragments:
            if _is_sent(program, fragment.number, step):
                fragment.exchange(sites, step)
        for fragment in fragments:
            for site in sites:
                site.receive(fragment, step)
        for rank, found in enumerate(seen):
            found.append(sites[rank // program.site_ranks].held_by(rank % program.site_ranks))
    for fragment in fragments:
        for site in sites:
            site.receive(fragment, None)
    for fragment in fragments:
        if fragment.sent_at < program.steps:
            fragment.exchange(sites, program.steps)
    for fragment in fragments:
        for site in sites:
            fragment.put(site, fragment.values.astype(np.float64), adds=False)
    for rank, found in enumerate(seen):
        found.append(sites[rank // program.site_ranks].held_by(rank % program.site_ranks))
    return seen


def _is_sent(program: Program, fragment: int, step: int) -> bool:
    first = (fragment + 1) * program.every_steps // program.fragments
    return step >= first and (step - first) % program.every_steps == 0


def _fragments(program: Program) -> list[list[int]]:
    """Returns the parameters of each fragment, by trying all ways to divide them."""
    trained = [n for n in range(len(program.shapes)) if n not in program.frozen]
    sizes = [int(np.prod(program.shapes[n], dtype=int)) for n in trained]

    def cost(cuts: tuple[int, ...]) -> int:
        pairs = itertools.pairwise([0, *cuts, len(sizes)])
        return max(sum(sizes[begin:end]) for begin, end in pairs)

    ways = list(itertools.combinations(range(1, len(sizes)), program.fragments - 1))
    least = min(map(cost, ways))
    # Of equally good ways, the one whose fragments are filled in their order.
    best = max(cuts for cuts in ways if cost(cuts) == least)
    return [trained[begin:end] for begin, end in itertools.pairwise([0, *best, len(trained)])]


class _SiteModel:
    """The parameters of one site, all of them whole."""

    def __init__(self, program: Program, site: int) -> None:
        self.program, self.site = program, site
        model = program.model(site)
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self, step: int) -> None:
        """Updates the parameters by the mean of the gradients of the ranks of the site."""
        ranks = range(self.program.site_ranks)
        for number, value in enumerate(self.values):
            if number not in self.program.frozen:
                own = [self.program.gradient(number, self.site, r, step).double() for r in ranks]
                gradient = torch.stack(own).sum(0) / len(ranks)
                if number == 0 and self.program.ties:
                    gradient = 2 * gradient
                new = value.double() - RATE * gradient
                self.values[number] = new.to(value.dtype)

    def receive(self, fragment: "_Fragment", step: int | None) -> None:
        """Applies a fragment that is due after a step, or whenever it was sent."""
        key = self.site
        if key not in fragment.in_flight:
            return
        sent, sent_at = fragment.in_flight[key]
        if step is not None and step - sent_at < self.program.delay_steps:
            return
        del fragment.in_flight[key]
        if self.program.delay_steps:
            fragment.put(self, fragment.dtype(fragment.values) - sent, adds=True)
        else:
            fragment.put(self, fragment.values, adds=False)

    def held_by(self, place: int) -> list[Tensor]:
        """Returns what a rank of the site holds of each parameter."""
        return [
            part.clone() for part in (_part(self.program, value, place) for value in self.values)
        ]


def _is_sharded(program: Program, value: Tensor) -> bool:
    return program.strategy in ("fsdp", "torch_fsdp2") and value.dim() > 0


def _part(program: Program, value: Tensor, place: int) -> Tensor:
    if not _is_sharded(program, value):
        return value
    rows = -(-value.shape[0] // program.site_ranks)
    return value[rows * place : rows * (place + 1)]


class _Fragment:
    """What the counterparts of one place in the sites exchange of some parameters."""

    def __init__(self, program: Program, numbers: list[int], place: int, first: _SiteModel) -> None:
        self.program, self.place = program, place
        self.number = [*map(tuple, _fragments(program))].index(tuple(numbers))
        self.numbers = numbers
        is_wide = program.dtype == "float64"
        self.dtype = np.float64 if is_wide else np.float32
        self.values = self.read(first)
        self.velocity = np.zeros(len(self.values), np.float32)
        self.left_out = np.zeros((program.num_sites, len(self.values)), np.float32)
        self.left_back = np.zeros(len(self.values), np.float32)
        self.in_flight: dict[int, tuple[Floats, int]] = {}
        self.sent_at = 0

    def read(self, site: _SiteModel) -> Floats:
        """Returns the vector of a site."""
        shards, piece = self._layout(site)
        parts = [part.flatten().double().numpy() for part in shards]
        sharded = np.concatenate([*parts, np.zeros(0)])
        whole = np.concatenate([*(part.flatten().double().numpy() for part in piece), np.zeros(0)])
        if not piece:
            return sharded.astype(self.dtype)
        sharded = np.concatenate([sharded, np.zeros(-len(sharded) % _BLOCK)])
        begin, end = self._own(len(whole))
        whole = np.concatenate([whole, np.zeros(end)])
        return np.concatenate([sharded, whole[begin:end]]).astype(self.dtype)

    def put(self, site: _SiteModel, vector: Floats, *, adds: bool) -> None:
        """Sets the elements of this place, or adds to them."""
        shards, piece = self._layout(site)
        begin, end = self._own(sum(part.numel() for part in piece))
        offset = 0
        for part in shards:
            self._put(part.view(-1), vector[offset : offset + part.numel()], adds=adds)
            offset += part.numel()
        if self.place and not self.program.divides:
            return  # The first rank's is the same.
        offset = -(-offset // _BLOCK) * _BLOCK if piece else offset
        place = 0
        for part in piece:
            for index in range(max(begin, place), min(end, place + part.numel())):
                at = offset + index - begin
                self._put(part.view(-1)[index - place, None], vector[at : at + 1], adds=adds)
            place += part.numel()

    def _put(self, part: Tensor, values: Floats, *, adds: bool) -> None:
        found = values.astype(self.dtype)
        if adds:
            found = part.to(torch.float64).numpy().astype(self.dtype) + found
        part.copy_(torch.from_numpy(np.ascontiguousarray(found)))

    def _layout(self, site: _SiteModel) -> tuple[list[Tensor], list[Tensor]]:
        values = [site.values[number] for number in self.numbers]
        shards = [
            _part(self.program, value, self.place)
            for value in values
            if _is_sharded(self.program, value)
        ]
        return shards, [value for value in values if not _is_sharded(self.program, value)]

    def _own(self, num_replicated: int) -> tuple[int, int]:
        if not self.program.divides or self.program.site_ranks == 1:
            return 0, num_replicated
        size = -(-num_replicated // (_BLOCK * self.program.site_ranks)) * _BLOCK
        return self.place * size, (self.place + 1) * size

    def exchange(self, sites: list[_SiteModel], step: int) -> None:
        """Averages the sites' vectors, and updates what they have in common."""
        program = self.program
        vectors = [self.read(site) for site in sites]
        gradients = [(self.values - vector).astype(np.float32) for vector in vectors]
        total = np.zeros(len(self.values), np.float32)
        for number, gradient in enumerate(gradients):
            sent = self._coded(gradient, self.left_out[number])
            total = sent if number == 0 else total + sent
        mean = self._coded(total * np.float32(1 / program.num_sites), self.left_back)
        update = mean
        if program.momentum:
            momentum = np.float32(program.momentum)
            self.velocity = momentum * self.velocity + mean
            update = momentum * self.velocity + mean
        self.values = self.values - (np.float32(program.learning_rate) * update).astype(self.dtype)
        self.sent_at = step
        self.in_flight = {site.site: (vectors[site.site], step) for site in sites}

    def _coded(self, values: Floats, left: Floats) -> Floats:
        """Returns what arrives of values, and puts the rest into `left`."""
        name = self.program.compression
        if name == "none":
            return values.copy()
        if name == "bf16":
            return torch.from_numpy(values).bfloat16().float().numpy()
        largest = {"int8": 127, "int4": 7}[name]
        result = np.empty_like(values)
        for begin in range(0, len(values), _BLOCK):
            part = slice(begin, begin + _BLOCK)
            given = values[part] + left[part]
            exact = np.abs(given).max() / np.float32(largest)
            bits = (int(np.float32(exact).view(np.uint32)) + 0xFFFF) // 2**16 * 2**16
            scale = np.uint32(bits).view(np.float32)
            if scale < np.finfo(np.float32).smallest_normal:
                result[part], left[part] = 0, given
                continue
            result[part] = np.rint(given * (np.float32(1) / scale)).astype(np.float32) * scale
            left[part] = given - result[part]
        return result
