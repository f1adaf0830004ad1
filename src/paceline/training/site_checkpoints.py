"""Checkpoints of several sites: each saves its own, and all resume from a step that all have.

Sites have other parameters and optimizer states between two exchanges, and often no directory in
common. The first site's checkpoints are where those of a run with one site are, and can be exported
or trained further without the others.

A checkpoint also has the outer loop's state of each rank of its site: its tensors under the rank's
number, and everything else in the rank's metadata.
"""

import contextlib
import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint.checkpointer import GROUP_TIMEOUT
from paceline.checkpoint.errors import CheckpointError, DamagedCheckpointError
from paceline.checkpoint.format import Json, Manifest
from paceline.checkpoint.restore import Restored, Source, load_step, restored_from
from paceline.checkpoint.storage import CheckpointStorage
from paceline.core.errors import PacelineError, UsageError
from paceline.core.finding import Finding
from paceline.parallel import OuterLoop, Session
from paceline.parallel.ranks.collectives import from_all, from_first
from paceline.training.config import RunConfig

_SITES = "sites"
_OUTER = "outer"


def site_of(config: RunConfig, session: Session) -> int:
    """Returns the number of a rank's site."""
    return session.rank // config.parallel.site_ranks(session.world_size)


def directory_of_site(config: RunConfig, session: Session) -> pathlib.Path:
    """Returns the directory under which a rank's site saves: that of the run, for the first."""
    site = site_of(config, session)
    return pathlib.Path(config.out, *((_SITES, str(site)) if site else ()))


def new_site_group(config: RunConfig, session: Session) -> dist.ProcessGroup:
    """Creates a CPU process group of the ranks of this site, for messages about checkpoints."""
    num_ranks = config.parallel.site_ranks(session.world_size)
    first = site_of(config, session) * num_ranks
    group = dist.new_group(
        [*range(first, first + num_ranks)],
        timeout=GROUP_TIMEOUT,
        backend="gloo",
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def load_newest_of_all(
    location: CheckpointStorage, load: Callable[[Source], None], group: dist.ProcessGroup
) -> Restored | None:
    """Loads the newest step that all sites have intact; returns None if no site has any.

    Newer steps, which some sites lack, are set aside, so that all can save them again. All ranks of
    all sites must call it.

    Args:
        location: This site's checkpoints.
        load: Loads what it needs from a source, the same on all ranks of a site.
        group: This site's ranks.
    """
    own: list[int] = from_first(location.steps, group)
    steps_of_all = from_all(own, None)
    common = sorted(set(own).intersection(*map(set, steps_of_all)), reverse=True)
    passed_over: list[Finding] = []
    manifest: Manifest | None = None
    for step in common:
        error: PacelineError | None = None
        try:
            manifest = load_step(location, step, load, group)
        except PacelineError as found:
            error = found
        errors = [each for each in from_all(error, None) if each is not None]
        if not errors:
            break
        manifest = None
        for each in errors:
            if not isinstance(each, DamagedCheckpointError):
                raise each
        passed_over.append(Finding(name="damaged", message=str(errors[0])))
    if manifest is None and any(steps_of_all):
        raise CheckpointError(
            f"{location.url}: the sites have no intact step in common "
            f"({'; '.join(sorted({_named(steps) for steps in steps_of_all}))}); move these "
            "checkpoints away to begin anew. Imported weights have to be in the checkpoints of "
            "every site"
        )
    newer = [step for step in own if manifest is None or step > manifest.step]
    from_first(functools.partial(_set_aside, location, newer), group)
    return None if manifest is None else restored_from(manifest, passed_over)


def _named(steps: list[int]) -> str:
    return f"one has {', '.join(map(str, steps)) or 'none'}"


def _set_aside(location: CheckpointStorage, steps: list[int]) -> None:
    for step in steps:
        with contextlib.suppress(CheckpointError):  # If nothing may be written there, it stays.
            location.quarantine(step, os.urandom(4).hex())


def outer_state(outer: OuterLoop | None, session: Session) -> tuple[dict[str, Any], Json]:
    """Returns the tensors and the metadata that this rank saves; all ranks of a site must call it.

    Both are empty in a run with one site.
    """
    if outer is None:
        return {}, {}
    state = outer.state_dict()
    flight = state["in_flight"]
    tensors = dict(_tensors(state))
    saved: Json = {key: value for key, value in state.items() if key != "fragments"}
    if flight is not None:
        saved["in_flight"] = {key: flight[key] for key in ("fragment", "step")}
    return {_OUTER: {str(session.rank): tensors}}, {_OUTER: saved}


def load_outer_state(source: Source, outer: OuterLoop, session: Session, *, is_new: bool) -> None:
    """Loads this rank's state, or begins anew with the loaded weights; all ranks must call it.

    Args:
        source: The checkpoint of this rank's site.
        outer: The loop.
        session: This rank.
        is_new: Whether the checkpoint has weights that no run has trained.
    """
    if is_new:
        outer.restart()
        return
    ranks = source.checkpoint.manifest.ranks
    site_ranks = dist.get_world_size(outer.inner_group)
    of_rank = (
        json.loads(bytes(ranks[session.rank % site_ranks])) if len(ranks) == site_ranks else {}
    )
    if _OUTER not in of_rank:
        raise UsageError(
            f"{source.checkpoint.storage.url}: is not of a site with {site_ranks} ranks among "
            f"{outer.num_sites} sites; resume with the ranks and parallel.outer.sites that saved it"
        )
    saved = of_rank[_OUTER]
    outer.require_loadable(saved)
    outer.forget_flight()  # Its result may be what the run goes back from.
    state = outer.state_dict()
    state.update(saved, fragments=state["fragments"])
    flight = state["in_flight"]
    if flight is not None:
        values = state["fragments"][flight["fragment"]]["values"]
        has_sent = outer.settings.delay_steps > 0
        state["in_flight"] = {**flight, "sent": torch.empty_like(values) if has_sent else None}
    state["fragments"] = [
        {name: torch.empty_like(tensor) for name, tensor in fragment.items()}
        for fragment in state["fragments"]
    ]
    source.load({_OUTER: {str(session.rank): dict(_tensors(state))}})
    outer.load_state_dict(state)


def _tensors(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a state that are not empty, by the names that they are saved under."""
    named = [
        (f"{number}.{name}", tensor)
        for number, fragment in enumerate(state["fragments"])
        for name, tensor in fragment.items()
    ]
    flight = state["in_flight"]
    if flight is not None and flight["sent"] is not None:
        named.append(("sent", flight["sent"]))
    return [(name, tensor) for name, tensor in named if tensor.numel()]
