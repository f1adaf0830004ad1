"""The inner optimizer of flat parameters, which updates and sends this rank's shards.

Under a container it sees neighbouring shards as one tensor.

Runs: neighbouring shards that the optimizer sees as one tensor.

An optimizer's step costs Python time per tensor. Under a container, the gradients of a flat
buffer's shard are contiguous, as is the shard itself. Neighbouring shards with the same options are
therefore passed to the optimizer as one tensor (a run), which is correct because the optimizer is
elementwise. If in some step only part of a run's shards have a gradient, the run is permanently
split, because the states of its shards differ from then on.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.parallel.ranks.collectives import GroupReference
from paceline.parallel.zero.bucket import ReducedGradient
from paceline.parallel.zero.flat_parameters import FlatParameters, Partition, Shard, flat_elements

STEP = "step"
"""Key of the step count, a scalar: it has the shape of a zero-dimensional parameter's state."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Neighbouring shards that the optimizer updates as one tensor, or a single shard."""

    flat: FlatParameters
    shards: Sequence[Shard]
    tensor: nn.Parameter
    """The tensor that the optimizer updates: the single shard's own, or one that spans all."""
    offsets: Sequence[int]
    """Start of each shard in the local shard of the flat buffer."""

    @property
    def is_one_shard(self) -> bool:
        """Whether the run consists of a single shard."""
        return self.tensor is self.shards[0].tensor

    @property
    def begin(self) -> int:
        """Start of the run in the local shard of its flat buffer."""
        return self.offsets[0]

    def state_of(self, shard: Shard, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a shard's part of the run's state."""
        if self.is_one_shard:
            return dict(state)
        piece = self._piece(self.shards.index(shard))
        return {
            key: value[piece] if _is_per_element(key, value, self.tensor) else value
            for key, value in state.items()
        }

    def can_join(self, states: Mapping[Shard, Mapping[str, Any]]) -> bool:
        """Returns whether all shards have equal state apart from per-element state."""
        first = states[self.shards[0]]
        for state in (states[shard] for shard in self.shards[1:]):
            if state.keys() != first.keys():
                return False
            for key, value in state.items():
                is_single = key == STEP or not isinstance(value, Tensor) or value.dim() == 0
                if is_single and values_differ(value, first[key]):
                    return False
        return True

    def join_states(self, states: Mapping[Shard, dict[str, Any]]) -> dict[str, Any]:
        """Returns the run's state, joined from the shards' states."""
        first = self.shards[0]
        joined = dict(states[first])
        if self.is_one_shard:
            return joined
        for key, value in states[first].items():
            if _is_per_element(key, value, first.tensor):
                joined[key] = value.new_zeros(self.tensor.shape)
                for index, shard in enumerate(self.shards):
                    joined[key][self._piece(index)] = states[shard][key]
        return joined

    def _piece(self, index: int) -> slice:
        shard, begin = self.shards[index], self.offsets[index] - self.begin
        return slice(begin, begin + shard.end - shard.start)


def single(flat: FlatParameters, shards: Sequence[Shard]) -> list[Run]:
    """Returns one run per shard."""
    return [Run(flat=flat, shards=[shard], tensor=shard.tensor, offsets=[0]) for shard in shards]


def join_neighbours(flat: FlatParameters, shards: Sequence[Shard]) -> list[Run]:
    """Returns runs of shards that are adjacent in the flat buffer."""
    indices = {shard: index for index, shard in enumerate(flat.shards)}
    runs = []
    for _, numbered in itertools.groupby(
        enumerate(shards), lambda item: indices[item[1]] - item[0]
    ):
        joined = [shard for _, shard in numbered]
        if len(joined) == 1:
            runs += single(flat, joined)
            continue
        offsets = [flat.offset_of(shard) for shard in joined]
        end = offsets[-1] + joined[-1].end - joined[-1].start
        tensor = nn.Parameter(flat.master[offsets[0] : end])
        runs.append(Run(flat=flat, shards=joined, tensor=tensor, offsets=offsets))
    return runs


def _is_per_element(key: str, value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and key != STEP and value.shape == tensor.shape


def values_differ(value: Any, other: Any) -> bool:
    """Returns whether two states or options differ in value."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return not torch.equal(value, other)
    return bool(value != other)


MakeOptimizer: TypeAlias = Callable[[list[dict[str, Any]]], Optimizer]

MASTER = "master"
"""Key under which a shard's value is saved if it is more precise than the parameter."""

NOT_OPTIONS = ("params", "param_names")
"""Keys of a group that are not options."""


class ChangedOption(NamedTuple):
    """An option that an optimizer has changed in its group, such as a step count or an estimate."""

    outer: dict[str, Any]
    """The group of whole parameters."""
    given: dict[str, Any]
    """The options last copied to the inner group."""
    name: str
    value: Any

    def take_over(self) -> None:
        """Copies the value to the outer group."""
        self.outer[self.name], self.given[self.name] = _own(self.value), _own(self.value)


class ShardOptimizer:
    """Steps this rank's shards of flat parameters, and sends them.

    The options of the outer groups, of whole parameters, apply to the shards. If a container
    reduce-scatters the gradients, its next forward pass waits for the sent shards
    (`is_awaited_elsewhere`), instead of the step itself.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        group: GroupReference,
        outer_groups: Sequence[dict[str, Any]],
        make: MakeOptimizer,
        *,
        is_awaited_elsewhere: bool = False,
    ) -> None:
        self.flats = flats
        self.group = group
        self._make = make
        self.is_awaited_elsewhere = is_awaited_elsewhere
        self.shards: list[Shard] = []
        """The shards that this rank's optimizer updates."""
        self.inner: Optimizer | None = None
        """The optimizer of the shards; None if no group contains any of the parameters."""
        self._runs: dict[Shard, Run] = {}
        self._outer_groups: list[dict[str, Any]] = []
        self._given: list[dict[str, Any]] = []
        """The options last copied to each inner group."""
        self.extend(outer_groups)

    def extend(self, outer_groups: Sequence[dict[str, Any]]) -> None:
        """Adds the shards of further groups."""
        groups = []
        for outer in outer_groups:
            chosen = set(outer["params"])
            parameters = [p for flat in self.flats for p in flat.parameters if p in chosen]
            if not parameters:
                continue
            runs = []
            for flat in self.flats:
                shards = [shard for shard in flat.shards if shard.parameter in chosen]
                self.shards += shards
                runs += (join_neighbours if self.is_awaited_elsewhere else single)(flat, shards)
            self._runs |= {shard: run for run in runs for shard in run.shards}
            self._outer_groups.append(outer)
            self._given.append(_options(outer))
            tensors = [run.tensor for run in runs]
            if not tensors:
                # This rank has no shard, but the optimizer may count steps in its groups.
                like = parameters[0].detach()
                tensors = [nn.Parameter(like.new_empty((0,) * max(1, like.dim())))]
            groups.append({**_options(outer), "params": tensors})
        if self.inner is None and groups:
            self.inner = self._make(groups)
        elif self.inner is not None:
            for group in groups:
                self.inner.add_param_group(group)

    def step(self, **keywords: Any) -> None:
        """Updates this rank's shards, and starts their all-gather."""
        flats = [flat for flat in self.flats if self._may_change(flat)]
        for flat in flats:
            flat.wait()
            flat.require_in_place()
            flat.follow_edits()
        if flats and self.inner is not None:
            self._pass_on_options(self.inner)
            if self.is_awaited_elsewhere:
                self._give_runs_their_gradients()
            elif self._cuts_gradients:
                for shard in self.shards:
                    shard.tensor.grad = self._cut_gradient(shard)
            self.inner.step(**keywords)
            if self._cuts_gradients:
                for shard in self.shards:
                    shard.tensor.grad = None
        for flat in flats:
            flat.publish(self.group.get())

    def _may_change(self, flat: FlatParameters) -> bool:
        """Returns whether to update and send parameters; equal on all ranks.

        Frozen parameters with earlier gradients change too, for example through momentum.
        """
        if flat.is_trained:
            return True
        if self.is_awaited_elsewhere:
            return flat.was_trained
        return any(parameter.grad is not None for parameter in flat.parameters)

    def _pass_on_options(self, inner: Optimizer) -> None:
        """Copies changed options, for example by schedulers, from the outer to the inner groups.

        Unchanged options are not copied, because an optimizer may keep counts among its options.
        """
        groups = zip(self._outer_groups, inner.param_groups, self._given, strict=True)
        for outer, inner_group, given in groups:
            for name, value in outer.items():
                if name not in NOT_OPTIONS and (name not in given or _differs(value, given[name])):
                    inner_group[name], given[name] = _own(value), _own(value)

    def changed_options(self) -> Iterator[ChangedOption]:
        """Yields the options that the inner optimizer has changed in its groups."""
        if self.inner is None:
            return
        groups = zip(self._outer_groups, self.inner.param_groups, self._given, strict=True)
        for outer, inner_group, given in groups:
            for name, value in inner_group.items():
                if name not in NOT_OPTIONS and (name not in given or _differs(value, given[name])):
                    yield ChangedOption(outer, given, name, value)

    @property
    def _cuts_gradients(self) -> bool:
        """Whether shards' gradients are slices of full gradients, which all ranks have."""
        return not self.is_awaited_elsewhere and self.flats[0].partition is Partition.ELEMENTS

    def _cut_gradient(self, shard: Shard) -> Tensor | None:
        gradient = shard.parameter.grad
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            raise UsageError(
                f"a parameter of shape {tuple(gradient.shape)} has a {gradient.layout} gradient, "
                'which cannot be split; use partition="parameters", or create its layer with '
                "sparse=False"
            )
        return flat_elements(shard.parameter, gradient)[shard.start : shard.end]

    def take_gradients_set_by_hand(self) -> None:
        """Copies full gradients set by user code to the shards.

        torch.distributed.checkpoint sets zeros, so that a step creates the optimizer's state.
        """
        for shard in self.shards:
            if shard.tensor.grad is not None or type(shard.parameter.grad) is ReducedGradient:
                continue
            flat = self._runs[shard].flat
            if shard.parameter in flat.local_gradients:
                continue  # A local gradient of a pass in no_sync, which the next pass sends.
            if (gradient := self._cut_gradient(shard)) is not None:
                shard.tensor.grad = flat.gradient_of(shard).copy_(gradient)

    def _give_runs_their_gradients(self) -> None:
        for run in dict.fromkeys(self._runs.values()):
            if run.is_one_shard:
                continue
            num_present = sum(shard.tensor.grad is not None for shard in run.shards)
            if num_present not in (0, len(run.shards)):
                self._split(run)
            elif num_present:
                run.tensor.grad = run.flat.gradient[run.begin : run.begin + run.tensor.numel()]
            else:
                run.tensor.grad = None

    def _split(self, run: Run) -> None:
        """Replaces a run with its single shards in the optimizer."""
        assert self.inner is not None
        states = {shard: self._state_of(shard) for shard in run.shards}
        self.inner.state.pop(run.tensor, None)
        for group in self.inner.param_groups:
            group["params"] = [
                tensor
                for present in group["params"]
                for tensor in (
                    [shard.tensor for shard in run.shards] if present is run.tensor else [present]
                )
            ]
        for shard, state in states.items():
            (self._runs[shard],) = single(run.flat, [shard])
            if state:
                self.inner.state[shard.tensor] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }

    def _state_of(self, shard: Shard) -> dict[str, Any]:
        assert self.inner is not None
        run = self._runs[shard]
        return run.state_of(shard, self.inner.state.get(run.tensor, {}))

    def has_master(self, shard: Shard) -> bool:
        """Returns whether a shard has a master copy in another dtype than its parameter."""
        return self._runs[shard].flat.has_master

    def state_of(self, shard: Shard) -> dict[str, Any]:
        """Returns a shard's state, including its master copy if it has one."""
        state = self._state_of(shard)
        if self.has_master(shard):
            state[MASTER] = shard.tensor.detach()
        return state

    def load_state(self, states: Mapping[Shard, dict[str, Any]]) -> None:
        """Loads the state of each shard; torch determines device and dtype."""
        if self.inner is None:
            return
        for run in dict.fromkeys(self._runs.values()):
            if not run.is_one_shard and not run.can_join(states):
                self._split(run)
        by_tensor = {
            run.tensor: run.join_states(states) for run in dict.fromkeys(self._runs.values())
        }
        tensors = [tensor for group in self.inner.param_groups for tensor in group["params"]]
        numbered = {
            number: by_tensor[tensor]
            for number, tensor in enumerate(tensors)
            if by_tensor.get(tensor)
        }
        groups = self.inner.state_dict()["param_groups"]
        self.inner.load_state_dict({"state": numbered, "param_groups": groups})


def _differs(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return value is not other  # The groups share tensors, so in-place changes reach both.
    return bool(value != other)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _own(value) for name, value in group.items() if name not in NOT_OPTIONS}


def _own(value: Any) -> Any:
    """Returns a copy of a list or dictionary; a tensor, such as a learning rate, is shared."""
    return copy.deepcopy(value) if isinstance(value, (list, dict)) else value
