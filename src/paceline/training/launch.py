"""Starts the ranks of a run on this host, or trains as one of them.

A run is started in one of four ways: as elastic replicas, which this process starts and restarts;
by a supervisor, which restarts ranks that die or hang; by a launcher such as torchrun or Slurm,
which has started this process as one rank; or by this process, which starts the other ranks.
"""

import contextlib
import dataclasses
import importlib
import os
import pathlib
import sys
import time
from collections.abc import Callable

import torch

from paceline.core.errors import RecordError, UsageError
from paceline.core.lock import InUseError, owned
from paceline.core.plan import Estimate
from paceline.core.processes import stop_code
from paceline.devices import accelerator
from paceline.health.errors import AgreedError
from paceline.parallel import distributed_session
from paceline.parallel.ranks.collectives import from_first
from paceline.parallel.ranks.heartbeats import beat_final
from paceline.parallel.ranks.placement import is_launched
from paceline.parallel.ranks.supervisor import Restart, supervise
from paceline.training.config import RunConfig
from paceline.training.loop import RunOutcome
from paceline.training.replica_launch import REPLICA, run_replicas
from paceline.training.run import require_startable, run, usable_bytes
from paceline.training.run_directory import append_run_history

_COMMAND = "paceline train"
_LEAVING_S = 3.0
"""Time for ranks to exit after saving, or after the grace period for saving has expired."""
_FIRST_RANK_SPEAKS_S = 5.0
_TIME_TO_REPORT_S = 30.0
"""How much longer collectives may take on an accelerator than a step. At their timeout torch ends
the process; before, the watchdog has to find out and report who is at fault."""
_LATE = ("torch._dynamo", "torch.profiler", "numpy.random", "rich.live")
"""What every forked rank would otherwise import late: constructing a torch optimizer imports
torch._dynamo, even without compiled blocks, which takes 2 s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How to start a run, and what to do with its result."""

    num_ranks: int | None
    """Ranks to start on this host; by default one per GPU, or `ParallelConfig.default_ranks`."""
    supervised: bool
    """Whether to restart ranks that die or hang."""
    max_restarts: int
    calibration: pathlib.Path | None
    """Records of ``paceline calibrate``, to predict the step time from."""
    predict_final_loss: Callable[[RunConfig], Estimate | None]
    """Predicts the final loss from smaller runs; called on rank 0."""
    remembers: bool
    """Whether a finished run is added to the history of predictions."""
    report: Callable[[RunOutcome], None]
    """Reports how the run ended; called on one rank."""
    guard: Callable[[Callable[[], int]], int]
    """Runs a forked rank; prints expected errors and returns its exit code."""


def launch(config: RunConfig, options: LaunchOptions) -> int:
    """Trains a run, and returns the exit code of this process."""
    grace_s = config.checkpoint.grace_s + _LEAVING_S
    if config.parallel.elastic == "replicas" and REPLICA not in os.environ:
        if options.supervised or is_launched(os.environ):
            raise UsageError(
                "parallel.elastic replicas starts and restarts its replicas itself; leave out "
                "--supervise and the launcher"
            )
        _require_startable(config, options.num_ranks)
        with owned(config.out, _COMMAND):
            return run_replicas(config, options.num_ranks or config.parallel.default_ranks, grace_s)
    if not options.supervised:
        if is_launched(os.environ):
            return _be_rank(config, options, ())
        _require_startable(config, options.num_ranks)
        with owned(config.out, _COMMAND):
            return _be_rank(config, options, ())
    if is_launched(os.environ):
        raise UsageError(
            "--supervise restarts only ranks that it has started itself; with torchrun use "
            "its --max-restarts, with Slurm --requeue"
        )
    # CUDA initialised here would be unusable in forked ranks, so torch queries NVML instead.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    num_ranks = _require_startable(config, options.num_ranks)
    for name in _LATE:
        importlib.import_module(name)
    with owned(config.out, _COMMAND):
        return supervise(
            lambda restarts: options.guard(lambda: _be_rank(config, options, restarts)),
            num_ranks=num_ranks,
            max_restarts=options.max_restarts,
            hang_s=config.parallel.timeout_s,
            grace_s=grace_s,
        )


def _be_rank(config: RunConfig, options: LaunchOptions, restarts: tuple[Restart, ...]) -> int:
    """Trains as one rank, or starts the ranks that train."""
    timeout_s = config.parallel.timeout_s
    if accelerator.device_type(config.parallel.device) != "cpu":
        timeout_s += _TIME_TO_REPORT_S
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(
            distributed_session(
                ranks_per_host=1 if REPLICA in os.environ else options.num_ranks,
                device=config.parallel.device,
                timeout_s=timeout_s,
                grace_s=config.checkpoint.grace_s + _LEAVING_S,
            )
        )
        try:
            if REPLICA not in os.environ:
                # Ranks of a launcher have no common ancestor of ours: the first owns the run.
                from_first(lambda: stack.enter_context(owned(config.out, _COMMAND)), None)
            final_loss = options.predict_final_loss(config) if session.rank == 0 else None
            outcome = run(config, session, options.calibration, final_loss, restarts)
        except (AgreedError, InUseError) as error:
            if isinstance(error, AgreedError) and error.is_final:
                beat_final()
            if session.rank == 0:
                raise
            # All ranks have the same error: rank 0 reports it, and ends the others.
            time.sleep(_FIRST_RANK_SPEAKS_S)
            raise SystemExit(error.exit_code) from None
        if session.rank == 0 and outcome.reports:
            options.report(outcome)
            if outcome.reason == "finished" and options.remembers:
                try:
                    append_run_history(config)
                except RecordError as error:  # The run itself has not failed.
                    sys.stderr.write(f"could not write the history of predictions: {error}\n")
    return 0 if outcome.reason == "finished" else stop_code()


def _require_startable(config: RunConfig, num_ranks: int | None) -> int:
    """Checks the config before starting ranks, which takes seconds; returns their number."""
    on_accelerator = accelerator.device_type(config.parallel.device) != "cpu"
    if not on_accelerator:
        num_ranks = num_ranks or config.parallel.default_ranks
        rank_bytes = usable_bytes(torch.device("cpu"), num_ranks)
    else:
        # Each rank queries its own GPU: a query here would use memory on the first one.
        num_ranks = num_ranks or accelerator.num_accelerators()
        rank_bytes = None
    require_startable(config, num_ranks, rank_bytes, on_accelerator=on_accelerator)
    return num_ranks
