"""``paceline lab``: emulates a cluster on this machine, and injects faults into a run."""

import dataclasses
import pathlib
import shlex
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from paceline.cli.output import FigurePath, Flat, OutputOptions
from paceline.core.errors import UsageError
from paceline.core.units import parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from paceline.lab.chaos import ChaosConfig
    from paceline.lab.faults import Kind
    from paceline.lab.network import LinkShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosCommand:
    """Run a command and inject faults: into its processes, links, disk and checkpoints.

    Acts only on processes that the command started, on the lab's virtual hosts, and on the run's
    directory. Restarts the command when it fails. Exit code 0 means that nothing was lost, every
    sample was used exactly once, and no process was left behind.
    """

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND")]
    """Command to run, after --: paceline train with its arguments."""
    directory: Annotated[pathlib.Path, tyro.conf.arg(name="run")]
    """Directory of the run, named by out in its config."""
    kill_every: str | None = None
    """Kill a random rank about this often, such as 30s."""
    every: str = "30s"
    """About how often each other kind of fault occurs."""
    stop: str | None = None
    """Stop a random rank (SIGSTOP) for this long, such as 5s."""
    link_down: str | None = None
    """Take a host's link down for this long; needs --hosts."""
    link_slow: str | None = None
    """Slow a host's link down to 50 Mbit/s for this long; needs --hosts."""
    link_loss: str | None = None
    """Drop 2% of a host's packets for this long; needs --hosts and iptables."""
    site_down: str | None = None
    """Take a site's uplink down for this long; needs --sites."""
    site_kill: bool = False
    """Kill all ranks of a site; needs --sites."""
    disk_full: bool = False
    """Fill the disk of the run for 5 s; needs root, to mount a tmpfs as this disk."""
    disk_size: str = "1GB"
    """Size of the disk for --disk-full."""
    corrupt: bool = False
    """Flip a bit in the newest checkpoint, or truncate one of its files, and kill a rank."""
    any_process: bool = False
    """Also kill and stop launchers and helper processes, not only ranks."""
    hosts: int = 0
    """Run the command once on each of this many virtual hosts, as lab run does; with --sites, of
    every site."""
    sites: int = 1
    """Number of sites that the virtual hosts are in."""
    duration: Annotated[str, tyro.conf.arg(name="for")] = "5min"
    """How long to inject faults; the run is then left to finish."""
    finish_within: str = "10min"
    """Time that the run may take to finish after the faults."""
    recover_within: str = "120s"
    """Time for the next step after a fault; without one, the run counts as lost."""
    steps_between: int = 10
    """Steps that the run makes after a fault before the next fault."""
    seed: int = 0
    """Random seed of the times and targets of faults."""
    no_restart: bool = False
    """Do not restart the command; leave restarts to the command itself."""
    reference: pathlib.Path | None = None
    """Directory of an undisturbed run; the losses must be bit-identical to its losses."""
    figure: FigurePath | None = None
    """Draw steps and faults over time: a file that ends in .png or .svg."""
    store: pathlib.Path | None = None
    """JSON Lines file to append one record per fault and one of the run to."""
    output: Flat[OutputOptions] = dataclasses.field(default_factory=OutputOptions)

    def run(self) -> int:
        """Runs the command under chaos, audits it, and prints each fault and its effect."""
        from paceline.lab.chaos import FAULT, RUN, audit_chaos, chaos_records, run_chaos
        from paceline.records import capture_environment
        from paceline.reports.tables.reliability import chaos_table
        from paceline.training.run_directory import CONFIG

        config = self._config()
        outcome = run_chaos(config)
        # Only runs of `paceline train` can be audited.
        is_auditable = (config.run / CONFIG).exists()
        audit = audit_chaos(config.run, config.reference) if is_auditable else None
        made = chaos_records(config, outcome, audit, capture_environment())
        records = list(self.output.keep(made, self.store))
        whole = next(record for record in records if record.kind == RUN)
        faults = [record for record in records if record.kind == FAULT]
        steps = whole.metrics["audited_steps"].value
        verdict = whole.reason or f"finished; {steps:,.0f} steps audited, nothing wrong"
        self.output.show((), chaos_table(faults), verdict)
        if self.figure is not None:
            from paceline.reports.plots.reliability import plot_chaos
            from paceline.reports.plots.style import save_as

            save_as(plot_chaos(records), self.figure)
        return 0 if whole.outcome == "ok" else 1

    def _config(self) -> "ChaosConfig":
        from paceline.lab.chaos import ChaosConfig

        return ChaosConfig(
            command=self.command,
            run=self.directory,
            kinds=self._kinds(),
            for_s=parse_seconds(self.duration, "duration"),
            finish_within_s=parse_seconds(self.finish_within, "time to finish"),
            recover_within_s=parse_seconds(self.recover_within, "time to recover"),
            steps_between=self.steps_between,
            seed=self.seed,
            any_process=self.any_process,
            restart=not self.no_restart,
            hosts_per_site=self.hosts,
            num_sites=self.sites,
            disk_bytes=parse_bytes(self.disk_size) if self.disk_full else 0,
            reference=self.reference,
        )

    def _kinds(self) -> "dict[str, Kind]":
        from paceline.lab.faults import FAULTS, Kind

        every_s = parse_seconds(self.every, "period")
        kinds = {}
        if self.kill_every is not None:
            kinds["kill"] = Kind(every_s=parse_seconds(self.kill_every, "period"))
        for name, fault in FAULTS.items():
            asked = getattr(self, name.replace("-", "_"), None)
            if isinstance(asked, str):
                kinds[name] = Kind(every_s=every_s, lasts_s=parse_seconds(asked, "duration"))
            elif asked:
                kinds[name] = Kind(every_s=every_s, lasts_s=fault.lasts_s)
        return kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Run a command once per rank on virtual hosts with shaped links, in one site or several.

    Rank 0's stdout passes through; everything else goes to stderr. The command finds RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME in its environment;
    with --sites also PACELINE_SITE and PACELINE_NUM_SITES. Ranks are numbered site by site.
    """

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND")]
    """The command and its arguments, after --."""
    hosts: int = 2
    """Number of virtual hosts, each in its own network namespace; with --sites, of every site."""
    ranks_per_host: int = 1
    """Ranks on each host."""
    rate: str | None = None
    """Bandwidth of each host's link in each direction, such as 2gbit; by default, not limited."""
    delay: str | None = None
    """Delay between hosts, such as 5ms; needs netem in the kernel."""
    loss: str | None = None
    """Fraction of packets that are lost, such as 1%."""
    sites: int = 1
    """Number of sites; all hosts of a site share its one uplink to the other sites."""
    site_rate: str | None = None
    """Bandwidth of each site's uplink in each direction, such as 100mbit."""
    site_delay: str | None = None
    """Delay from one site to another, such as 20ms."""
    site_loss: str | None = None
    """Fraction of packets from one site to another that are lost, such as 0.1%."""

    def run(self) -> int:
        """Runs the command and returns its exit code."""
        from paceline.lab.run import run_in_lab

        if not self.command:
            raise UsageError("nothing to run: put the command after --")
        if min(self.sites, self.hosts, self.ranks_per_host) < 1:
            raise UsageError("--sites, --hosts and --ranks-per-host must be at least 1")
        uplink = (self.site_rate, self.site_delay, self.site_loss)
        return run_in_lab(
            self.command,
            num_sites=self.sites,
            hosts_per_site=self.hosts,
            ranks_per_host=self.ranks_per_host,
            link=_link_shape(self.rate, self.delay, self.loss),
            uplink=None if uplink == (None, None, None) else _link_shape(*uplink),
        )


def _link_shape(rate: str | None, delay: str | None, loss: str | None) -> "LinkShape":
    from paceline.lab.network import LinkShape, parse_loss

    return LinkShape(
        rate_bits_per_s=None if rate is None else parse_rate(rate),
        delay_s=0.0 if delay is None else parse_seconds(delay, "delay"),
        loss=0.0 if loss is None else parse_loss(loss),
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
    directory: pathlib.Path | None = None
    """Directory for all files of the cluster; by default paceline-slurm in XDG_RUNTIME_DIR, or in
    the user's state directory."""
    output: Flat[OutputOptions] = dataclasses.field(default_factory=OutputOptions)

    def run(self) -> int:
        """Performs the action and prints the resulting state."""
        from paceline.lab.slurm import default_directory, slurm_status, start_slurm, stop_slurm

        directory = self.directory or default_directory()
        if self.action == "start":
            status = start_slurm(
                directory,
                num_nodes=self.nodes,
                cpus_per_node=self.cpus_per_node,
                gpus_per_node=self.gpus_per_node,
            )
        else:
            if self.action == "stop":
                stop_slurm(directory)
            status = slurm_status(directory)
        lines = [f"{status.state} in {status.directory}", *status.nodes]
        if self.action == "start":
            lines = [f"export SLURM_CONF={shlex.quote(status.configuration)}"]
        self.output.show([status], *lines)
        return 0
