"""``paceline lab``: emulates a cluster on this machine."""

import dataclasses
import os
import pathlib
import sys
import tempfile
from typing import Annotated, Literal

import tyro

from paceline.cli.lab.chaos import ChaosCommand
from paceline.cli.output import Flat, OutputOptions, print_json
from paceline.core.errors import UsageError
from paceline.core.units import parse_rate, parse_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Run a command once per rank on virtual hosts with shaped links.

    Rank 0's stdout passes through; everything else goes to stderr. The command finds RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME in its environment.
    """

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND")]
    """The command and its arguments, after --."""
    hosts: int = 2
    """Number of virtual hosts, each in its own network namespace."""
    ranks_per_host: int = 1
    """Ranks on each host."""
    rate: str | None = None
    """Bandwidth of each host's link in each direction, such as 2gbit; by default, not limited."""
    delay: str | None = None
    """Delay between hosts, such as 5ms; needs netem in the kernel."""
    loss: str | None = None
    """Fraction of packets that are lost, such as 1%."""

    def run(self) -> int:
        """Runs the command and returns its exit code."""
        from paceline.lab.run import run_in_lab
        from paceline.lab.shaping import LinkShape, parse_loss

        if not self.command:
            raise UsageError("nothing to run: put the command after --")
        if self.hosts < 1 or self.ranks_per_host < 1:
            raise UsageError("--hosts and --ranks-per-host must be at least 1")
        link = LinkShape(
            rate_bits_per_s=None if self.rate is None else parse_rate(self.rate),
            delay_s=0.0 if self.delay is None else parse_seconds(self.delay, "delay"),
            loss=0.0 if self.loss is None else parse_loss(self.loss),
        )
        return run_in_lab(
            self.command, num_hosts=self.hosts, ranks_per_host=self.ranks_per_host, link=link
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmCommand:
    """Start, stop or inspect a throw-away Slurm cluster on this machine.

    start prints the shell line that points Slurm's commands at this cluster; run it with eval.
    """

    action: Annotated[Literal["start", "stop", "status"], tyro.conf.Positional]
    """start, stop or status."""
    nodes: int = 2
    """Virtual nodes."""
    cpus_per_node: int = 4
    """CPUs that each node claims to have."""
    gpus_per_node: int = 2
    """GPUs that each node claims to have; there are no real ones behind them."""
    directory: pathlib.Path = pathlib.Path(tempfile.gettempdir()) / f"paceline-slurm-{os.geteuid()}"
    """Directory for all files of the cluster."""
    output: Flat[OutputOptions] = dataclasses.field(default_factory=OutputOptions)

    def run(self) -> int:
        """Performs the action and prints the resulting state."""
        from paceline.lab.slurm import slurm_status, start_slurm, stop_slurm

        if self.action == "start":
            status = start_slurm(
                self.directory,
                num_nodes=self.nodes,
                cpus_per_node=self.cpus_per_node,
                gpus_per_node=self.gpus_per_node,
            )
        else:
            if self.action == "stop":
                stop_slurm(self.directory)
            status = slurm_status(self.directory)
        if self.output.json:
            print_json(status)
        elif self.action == "start":
            sys.stdout.write(f"export SLURM_CONF={status.configuration}\n")
        else:
            lines = [f"{status.state} in {status.directory}", *status.nodes]
            sys.stdout.write("\n".join(lines) + "\n")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabCommand:
    """Emulate a cluster on this machine: a slow network, a Slurm scheduler, faults."""

    part: (
        Annotated[RunCommand, tyro.conf.subcommand("run")]
        | Annotated[SlurmCommand, tyro.conf.subcommand("slurm")]
        | Annotated[ChaosCommand, tyro.conf.subcommand("chaos")]
    )

    def run(self) -> int:
        """Runs a command in the lab or under chaos, or manages the Slurm cluster."""
        return self.part.run()
