"""The outer loop: sites train alone, and average their parameters rarely, in few bits, meanwhile.

A site is a set of ranks with fast links, which train one copy of the model with any strategy. Sites
have slow links between them. After a step of the inner optimizer that the schedule says:

1. A rank computes how far its part of a fragment has moved from the values that all sites have in
   common (the outer gradient), and sends it to its counterparts in the other sites.
2. `delay_steps` later, it waits for the new common values, which the outer optimizer has made of
   the average meanwhile. If a site has refused the exchange, all raise.
3. The ranks of a site give the parameters their new values. With a delay, training has gone on, and
   the parameters become the new common values plus what training has added since they were sent.

Published alternatives to 3 mix old and new values by a factor. That takes part of what the site has
learned meanwhile from it, and lets the other part count twice, because the next outer gradient
includes it again. The sum needs no factor, is the plain outer loop without a delay, and keeps each
local step once.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.core.outer import OuterCompression, OuterSettings
from paceline.parallel.compression.queue import CompressedQueue
from paceline.parallel.contract import require_supported
from paceline.parallel.digest import digests
from paceline.parallel.dtensor import local_tensor
from paceline.parallel.outer.exchange import Exchange, ExchangeReport, FragmentState, Pieces
from paceline.parallel.outer.fragments import Fragment, trained_parameters
from paceline.parallel.outer.header import Header, Sites
from paceline.parallel.outer.optimizer import OuterUpdate
from paceline.parallel.outer.rows import packing_of
from paceline.parallel.outer.schedule import Schedule, divide
from paceline.parallel.outer.site import Site
from paceline.parallel.ranks.pending import Pending
from paceline.parallel.same_model import broadcast_tensors, describe_model, fingerprint


@dataclasses.dataclass(kw_only=True)
class _Flight:
    """A fragment between its sending and the change of the parameters."""

    fragment: int
    step: int
    sent: Tensor | None
    """The parameters when they were sent; None if nothing changes them until they are set."""
    exchange: Exchange | None
    """The exchange; None after its end."""
    pending: Pending | None


class OuterLoop:
    """Averages the parameters of several sites, each of which trains its own copy of a model.

    It acts at the end of `optimizer.step()`. All ranks of all sites create it together, after the
    model is wrapped and before states are loaded. All sites then have the values of the first.
    Leaving its context without an error calls `finish`.

    Args:
        model: The model of this site, plain or wrapped over the site's ranks. What is trained must
            not change; buffers stay the site's own.
        optimizer: The optimizer of this site; the one that steps last, if there are several.
        group: The ranks of the same place in each site, one per site, as a group or a
            one-dimensional mesh.
        every_steps: Steps between two exchanges of the same parameters.
        fragments: Number of parts of the parameters, which are sent one after the other.
        delay_steps: Steps of training that go on while a fragment is in flight; 0 to wait for it.
        learning_rate: Learning rate of the outer optimizer; with 1 and no momentum, parameters are
            set to their mean over the sites. `paceline.core.outer.default_update` knows more.
        momentum: Its Nesterov momentum.
        compression: "int4", "int8", "bf16" or "none": how parameters travel between sites.
        inner_group: All ranks of this site. They divide what they replicate, so that each number
            goes over the slow link once, and raise their errors together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        group: dist.ProcessGroup | DeviceMesh,
        every_steps: int,
        fragments: int = 1,
        delay_steps: int = 0,
        learning_rate: float = 1.0,
        momentum: float = 0.0,
        compression: OuterCompression = "int4",
        inner_group: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self.settings = OuterSettings(
            every_steps=every_steps,
            fragments=fragments,
            delay_steps=delay_steps,
            learning_rate=learning_rate,
            momentum=momentum,
            compression=compression,
        )
        """The settings, equal in all sites."""
        self._model = model
        self._device = require_supported(model)
        self._site = Site(group, inner_group, self._device)
        self._site.require_inside(model)
        trained = trained_parameters(model)
        self._names = [each.name for each in trained]
        divided = f"{self._site.num_replicas} ranks that divide parameters"
        lines = describe_model(model, f"{self.settings}, {divided}")
        lines += [f"{each.num_local} elements of {each.name!r} here" for each in trained]
        self._site.require_same(lines)
        self._fingerprint = fingerprint(lines)
        self._fragments = [
            Fragment(
                trained[part.start : part.stop],
                num_replicas=self._site.num_replicas,
                replica=self._site.replica,
                device=self._device,
            )
            for part in divide([each.num_elements for each in trained], fragments)
        ]
        self._packing = packing_of(compression)
        self._update = OuterUpdate(learning_rate=learning_rate, momentum=momentum)
        self._schedule = Schedule(self.settings)
        self._step = 0
        self._num_exchanges = 0
        self._last_sent = [0] * fragments
        """The step of the last completed exchange of each fragment."""
        self._flight: _Flight | None = None
        self.last_exchange: ExchangeReport | None = None
        """The last completed exchange."""
        self._states = self._first_states()
        self._queue = CompressedQueue(self._site.across, self._device, reads_values=True)
        self._hook = optimizer.register_step_post_hook(lambda *_: self.after_step())

    @property
    def step(self) -> int:
        """Number of steps of the inner optimizer."""
        return self._step

    @property
    def inner_group(self) -> dist.ProcessGroup | None:
        """The ranks of this site, if they divide what they replicate."""
        return self._site.inside

    @property
    def num_sites(self) -> int:
        """Number of sites."""
        return self._site.num_sites

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | object) -> None:
        if kind is None:
            self.finish()
        self.close()

    def close(self) -> None:
        """Leaves the optimizer alone from now on; sends nothing."""
        self._hook.remove()

    @torch.no_grad()
    def after_step(self) -> None:
        """Sends and applies what is due after a step; the optimizer calls it."""
        self._step += 1
        self._apply_if_due()
        if (number := self._schedule.sent(self._step)) is not None:
            self._send(number)
            self._apply_if_due()

    def take_last_exchange(self) -> ExchangeReport | None:
        """Returns the last exchange that has ended since the last call, if there is any."""
        report, self.last_exchange = self.last_exchange, None
        return report

    @torch.no_grad()
    def finish(self) -> None:
        """Applies what is in flight, exchanges what has changed since, and closes the loop.

        Afterwards all sites have the same parameters. All ranks of all sites must call it.
        """
        if self._flight is not None:
            self._apply(self._flight)
        for number, last_sent in enumerate(self._last_sent):
            if last_sent < self._step:
                self._send(number)
                assert self._flight is not None
                self._complete(self._flight)
                self._flight = None
        named = self._parameters()
        for fragment, state in zip(self._fragments, self._states, strict=True):
            fragment.write(state.values, named, self._site.inside, adds=False)
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state, to be saved with the site's model and inner optimizer.

        Waits for the exchange in flight. All ranks of a site must call it, at the same step.
        """
        flight = self._flight
        if flight is not None:
            self._complete(flight)
        return {
            **self._identity(),
            "step": self._step,
            "num_exchanges": self._num_exchanges,
            "last_sent": list(self._last_sent),
            "fragments": [state.tensors() for state in self._states],
            "in_flight": None
            if flight is None
            else {"fragment": flight.fragment, "step": flight.step, "sent": flight.sent},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of the same rank; load model and inner optimizer as well.

        Args:
            state: What `state_dict` has returned.
        """
        self.require_loadable(state)
        self.forget_flight()
        self._states = [
            self._loaded(own, found)
            for own, found in zip(self._states, state["fragments"], strict=True)
        ]
        self._step = state["step"]
        self._num_exchanges = state["num_exchanges"]
        self._last_sent = list(state["last_sent"])
        flight = state["in_flight"]
        self._flight = flight and _Flight(
            fragment=flight["fragment"],
            step=flight["step"],
            sent=None if flight["sent"] is None else flight["sent"].to(self._device),
            exchange=None,
            pending=None,
        )

    def require_loadable(self, state: Mapping[str, Any]) -> None:
        """Raises unless a state is of the same rank of the same loop; looks at no tensors.

        Args:
            state: As for `load_state_dict`.
        """
        for key, own in self._identity().items():
            if state[key] != own:
                raise UsageError(
                    f"the state is of an outer loop with {key.replace('_', ' ')} {state[key]}, "
                    f"and this one has {own}; make the loop as it was, or begin a new one"
                )

    def restart(self) -> None:
        """Begins anew with the parameters that the first site has now, as after loading weights.

        All ranks of all sites must call it.
        """
        self.forget_flight()
        self._step = self._num_exchanges = 0
        self._last_sent = [0] * self.settings.fragments
        self._states = self._first_states()

    def forget_flight(self) -> None:
        """Waits for the exchange in flight and drops its result, as before another state is loaded.

        No site lacks its messages then. All ranks of all sites must call it.
        """
        if self._flight is not None and self._flight.pending is not None:
            self._flight.pending.wait()
        self._flight = None

    def _identity(self) -> dict[str, Any]:
        """Returns what must be equal to load a state, by name."""
        return {
            "parameters": self._names,
            "sizes": [fragment.length for fragment in self._fragments],
            "sites": self._site.num_sites,
            "site": self._site.number,
            "every_steps": self.settings.every_steps,
            "delay_steps": self.settings.delay_steps,
            "compression": self.settings.compression,
            "has_momentum": bool(self.settings.momentum),
        }

    def _loaded(self, own: FragmentState, found: Mapping[str, Tensor]) -> FragmentState:
        copies = {
            name: torch.empty_like(tensor).copy_(found[name])
            for name, tensor in own.tensors().items()
        }
        return dataclasses.replace(own, **copies)

    def _parameters(self) -> dict[str, nn.Parameter]:
        # Found anew each time, because a module's parameters may be replaced by loading. FSDP2 has
        # others while it keeps some gathered, as after an evaluation.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return dict(self._model.named_parameters())

    def _common_values(self) -> list[Tensor]:
        """Returns this rank's vector of each fragment, with the first site's values everywhere."""
        named = self._parameters()
        vectors = [fragment.read(named) for fragment in self._fragments]
        if self._differ_anywhere(vectors):
            for fragment, vector in zip(self._fragments, vectors, strict=True):
                dist.broadcast(vector, group=self._site.across, group_src=0)
                with torch.no_grad():
                    fragment.write(vector, named, self._site.inside, adds=False)
        others = [local_tensor(named[name]) for name in named if name not in set(self._names)]
        others += [local_tensor(buffer) for buffer in self._model.buffers()]
        if self._differ_anywhere(others):
            broadcast_tensors(others, self._site.across)
        return vectors

    def _differ_anywhere(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether sites have other values, the same on all ranks of all sites."""
        sites = Sites(self._site.across, self._device)
        found = sites.gather(digests(tensors, self._device).tolist())
        # Ranks of a site write together, so they must find the same.
        return self._site.any(any(other != found[0] for other in found))

    def _first_states(self) -> list[FragmentState]:
        return [
            self._first_state(fragment, values)
            for fragment, values in zip(self._fragments, self._common_values(), strict=True)
        ]

    def _first_state(self, fragment: Fragment, values: Tensor) -> FragmentState:
        numbers = torch.zeros(fragment.length, device=self._device)
        piece = Pieces(fragment.length, self._site.num_sites).slices[self._site.number]
        coded = self.settings.keeps_residuals
        return FragmentState(
            values=values,
            velocity=numbers.clone() if self.settings.momentum else None,
            left_out=numbers.clone() if coded else numbers[:0],
            left_back=numbers[piece].clone() if coded else numbers[:0],
        )

    def _send(self, number: int) -> None:
        named = self._parameters()
        fragment, state = self._fragments[number], self._states[number]
        vector = fragment.read(named)
        gradient = (state.values - vector).to(torch.float32)
        trained = [name for name, parameter in named.items() if parameter.requires_grad]
        header = Header(
            settings=self._fingerprint,
            has_changed=trained != self._names,
            num_members=self._site.num_sites,
            exchange=self._num_exchanges,
            fragment=number,
            step=self._step,
            compression=fingerprint([self.settings.compression]),
            num_elements=fragment.length,
            is_finite=True,
        )
        exchange = Exchange(header, gradient, state, packing=self._packing, update=self._update)
        work = self._queue.start(exchange.run)
        self._flight = _Flight(
            fragment=number,
            step=self._step,
            sent=vector if self.settings.delay_steps else None,
            exchange=exchange,
            pending=Pending("exchange", gradient.nbytes, [work], self._device, direct=True),
        )

    def _apply_if_due(self) -> None:
        flight = self._flight
        if flight is not None and self._step - flight.step >= self.settings.delay_steps:
            self._apply(flight)

    def _apply(self, flight: _Flight) -> None:
        """Waits for a fragment, and changes the parameters."""
        self._complete(flight)
        self._flight = None
        values = self._states[flight.fragment].values
        self._fragments[flight.fragment].write(
            values if flight.sent is None else values - flight.sent,
            self._parameters(),
            self._site.inside,
            adds=flight.sent is not None,
        )

    def _complete(self, flight: _Flight) -> None:
        """Waits for the exchange of a fragment, if it is not over yet, and takes its result."""
        exchange, pending = flight.exchange, flight.pending
        if exchange is None or pending is None:
            return
        began = time.perf_counter()
        pending.wait()
        exposed_s = time.perf_counter() - began
        flight.exchange = flight.pending = self._flight = None
        self._site.raise_together(exchange.error)
        self._flight = flight
        assert exchange.result is not None
        self._states[flight.fragment] = exchange.result
        self._last_sent[flight.fragment] = flight.step
        self.last_exchange = ExchangeReport(
            exchange=self._num_exchanges,
            fragment=flight.fragment,
            step=flight.step,
            sent_bytes=exchange.sent_bytes,
            in_flight_s=exchange.in_flight_s,
            exposed_s=exposed_s,
            own_drift=float(exchange.own_drift),
            mean_drift=exchange.mean_drift,
        )
        self._num_exchanges += 1
