"""Kills ranks and the launcher of a training run in every phase, and checks that it recovers.

A run under `paceline train --supervise` is killed repeatedly. The seed determines the rank and the
phase. Most kills come at least ten steps after the last restart. Some hit ranks that have just
started, during rendezvous or load. Some hit the launcher, after which the command is started again,
as a scheduler would do. At the end, losses and parameters must be bit-identical to those of an
undisturbed run, samples are audited, and leftover processes are counted.

Appends one `fault` record per phase to the store, and one row per kill to kills-each.jsonl next to
it.

    python -m studies.reliability.kills results/kills.jsonl --kills 60
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time

from paceline.parallel.ranks.heartbeats import Heartbeat, Heartbeats, Phase, Writing
from paceline.training.config import ParallelConfig, RunConfig
from paceline.training.metrics import RESTARTED, EventRow, MetricsFile
from paceline.training.run_directory import audit_run
from studies.harness.records import FaultRecords
from studies.harness.runs import run_to_disturb, steps_of, write_config
from studies.harness.study import start_paceline, study_parser
from tests.processes import children_of, is_running

IN_A_STEP = ("data", "forward", "backward", "all-reduce", "update")
IN_A_SAVE = ("write", "publish")
IN_A_START = ("rendezvous", "load")
LAUNCHER = "launcher"
RESUMED_STEPS = 10
_STEPS_PER_KILL = 25
_PATIENCE_S = 5.0
"""Longest wait for the wanted phase; then the rank is killed in whatever phase it is in."""
_HANG_S = 300.0
_POLL_S = 0.0002
_GONE_S = 5.0


@dataclasses.dataclass(kw_only=True)
class Kill:
    """One kill and its outcome."""

    number: int
    wanted: str
    rank: int | None
    """None for the launcher."""
    phase: str = ""
    """The victim's phase at its last heartbeat."""
    writing: str = ""
    """The victim's checkpoint activity at its last heartbeat."""
    step: int = 0
    resumed_steps: int = 0
    """Steps since the previous restart."""
    gone_s: float = 0.0
    """Seconds from the kill to the end of the attempt's last process, at most `_GONE_S`."""
    recovery_s: float = 0.0
    """Seconds from the kill to the end of the first step after it; 0 if another kill came first."""
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    """Durations of the restart's parts, as recorded by the run."""
    orphans: int = 0
    """Processes of the killed attempt that still ran 5 s later."""
    bit_equal: bool = False
    """Whether the losses up to the next kill equal those of the undisturbed run."""
    launch: int = 0
    """Number of times the command had been started."""
    restart: int = 0
    """Number of the restart within that launch."""


class Run:
    """The training command and its ranks.

    Args:
        config: The run; its config file is written next to the run's directory.
        num_ranks: Number of ranks.
        max_restarts: Restart limit of the supervisor.
    """

    def __init__(self, config: RunConfig, num_ranks: int, max_restarts: int) -> None:
        self._command = ["train", str(write_config(config)), "--ranks", str(num_ranks)]
        self._command += ["--supervise", "--max-restarts", str(max_restarts)]
        self._log = pathlib.Path(f"{config.out}.log")
        self._num_ranks = num_ranks
        self.num_launches = 0
        self.launch()

    def launch(self) -> None:
        """Starts the command and waits until the ranks are forked."""
        self.process = start_paceline(*self._command, log=self._log)
        self.num_launches += 1
        deadline = time.monotonic() + _HANG_S
        while len(self.ranks()) < self._num_ranks:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run does not start; see {self._log}")
            time.sleep(0.01)
        self.beats = Heartbeats.of_process(self.process.pid)

    def ranks(self) -> list[int]:
        """Returns the process ids of the ranks, in rank order."""
        return children_of(self.process.pid)

    def is_over(self) -> bool:
        """Returns whether the command has ended."""
        return self.process.poll() is not None


def is_in(beat: Heartbeat, wanted: str) -> bool:
    """Returns whether a rank is in the wanted phase."""
    if wanted in IN_A_SAVE:
        return beat.writing == Writing[wanted.upper()]
    return beat.phase == Phase[wanted.upper().replace("-", "_")]


def wait_for(run: Run, rank: int, wanted: str, steps: int) -> bool:
    """Waits for a rank's phase after `steps` steps; returns whether the run is still running."""
    deadline = time.monotonic() + _HANG_S
    is_due = False
    while not run.is_over() and time.monotonic() < deadline:
        beat = run.beats[rank]
        if len(run.ranks()) == len(run.beats) and beat.num_steps >= steps:
            if is_in(beat, wanted):
                return True
            if not is_due:
                is_due, deadline = True, time.monotonic() + _PATIENCE_S
        time.sleep(_POLL_S)
    return not run.is_over()


def kill(run: Run, this: Kill, *, until_a_step: bool) -> None:
    """Kills, then waits for new ranks and, with `until_a_step`, for their first step."""
    beat = run.beats[this.rank or 0]
    before = run.ranks()
    victim = run.process.pid if this.rank is None else before[this.rank]
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    last = run.beats[this.rank or 0]
    this.phase, this.writing, this.step = str(last.phase), str(last.writing), last.step
    this.resumed_steps, this.launch = beat.num_steps, run.num_launches
    if this.rank is None:
        run.process.wait()
    while any(map(is_running, before)) and time.monotonic() - killed_s < _GONE_S:
        time.sleep(_POLL_S)
    this.orphans = sum(map(is_running, before))
    this.gone_s = time.monotonic() - killed_s
    if this.rank is None:
        run.launch()
    while not run.is_over() and (
        len(run.ranks()) < len(before)
        or set(run.ranks()) & set(before)
        or (until_a_step and run.beats[0].num_steps < 1)
    ):
        time.sleep(_POLL_S)
    if until_a_step:
        this.recovery_s = time.monotonic() - killed_s


def study(run: Run, arguments: argparse.Namespace) -> list[Kill]:
    """Kills until `arguments.kills` is reached or the run has ended."""
    chance = random.Random(arguments.seed)
    kills: list[Kill] = []
    restarts = 0
    ordinary = 0

    def strike(wanted: str, rank: int | None, *, until_a_step: bool = True) -> None:
        nonlocal restarts
        this = Kill(number=len(kills) + 1, wanted=wanted, rank=rank)
        kill(run, this, until_a_step=until_a_step)
        restarts = 0 if rank is None else restarts + 1
        this.restart = restarts
        kills.append(this)
        print(
            f"{this.number}: {this.wanted} rank {this.rank}: in {this.phase}/{this.writing} after "
            f"step {this.step}, back in {this.recovery_s:.2f} s",
            flush=True,
        )

    while ordinary < arguments.kills:
        rank = chance.randrange(arguments.ranks)
        wanted = chance.choice((*IN_A_STEP, *IN_A_SAVE))
        if wanted == "publish":
            rank = 0  # Only rank 0 publishes.
        steps = RESUMED_STEPS + chance.randrange(8)
        if not wait_for(run, rank, wanted, steps):
            break
        ordinary += 1
        is_launcher = ordinary % arguments.launcher_every == 0
        strike(LAUNCHER if is_launcher else wanted, None if is_launcher else rank)
        if ordinary % arguments.start_every == 0:
            if not wait_for(run, 0, "data", RESUMED_STEPS):
                break
            ordinary += 1
            strike("data", 0, until_a_step=False)
            again = chance.choice(IN_A_START)
            if wait_for(run, rank, again, 0):
                strike(again, rank)
    return kills


def judge(kills: list[Kill], config: RunConfig, reference: RunConfig) -> list[str]:
    """Completes the kills with the results of the finished run; returns everything that failed."""
    wrong = []
    ours, theirs = ({row.step: row for row in steps_of(each)} for each in (config, reference))
    is_equal = {step: ours.get(step) and ours[step].loss == theirs[step].loss for step in theirs}
    events: dict[tuple[int, int], EventRow] = {}
    launch = 1
    for row in MetricsFile(f"{config.out}/metrics.jsonl").read():
        if isinstance(row, EventRow) and row.name == RESTARTED and row.details is not None:
            number = int(row.details["restart"])
            while (launch, number) in events:
                launch += 1
            events[launch, number] = row
    for index, this in enumerate(kills):
        end = kills[index + 1].step if index + 1 < len(kills) else max(theirs)
        this.bit_equal = all(is_equal[step] for step in range(this.step, end + 1) if step)
        event = events.get((this.launch, this.restart))
        if event is not None and event.details is not None and this.rank is not None:
            this.parts |= {
                name: float(value) for name, value in event.details.items() if name.endswith("_s")
            }
            this.parts.pop("noticed_s", None)
        if not this.bit_equal:
            wrong.append(f"kill {this.number}: losses differ")
        if this.orphans:
            wrong.append(f"kill {this.number}: {this.orphans} processes were left")
    missing = [step for step in theirs if step not in ours]
    if missing:
        wrong.append(f"{len(missing)} steps are missing")
    num_steps, findings = audit_run(pathlib.Path(config.out))
    wrong += [str(finding) for finding in findings]
    if newest(config) != newest(reference):
        wrong.append("the last checkpoint differs")
    print(f"audited {num_steps} steps: {len(findings)} findings")
    return wrong


def newest(config: RunConfig) -> dict[str, bytes]:
    """Returns the tensor files of a run's newest checkpoint: their bytes by name."""
    last = max((pathlib.Path(config.out) / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def record(kills: list[Kill], wrong: list[str], arguments: argparse.Namespace) -> None:
    """Writes a row per kill and a record per phase."""
    with arguments.store.with_name("kills-each.jsonl").open("a", encoding="utf-8") as file:
        for each in kills:
            file.write(json.dumps(dataclasses.asdict(each)) + "\n")
    records = FaultRecords(arguments.store)
    by_phase: dict[str, list[Kill]] = collections.defaultdict(list)
    for each in kills:
        by_phase[where(each)].append(each)
    for phase, of_phase in sorted(by_phase.items()):
        times = [each.recovery_s for each in of_phase if each.recovery_s]
        parts = {
            name: [each.parts[name] for each in of_phase if name in each.parts]
            for name in sorted({name for each in of_phase for name in each.parts})
        }
        lost = sum(not each.bit_equal or bool(each.orphans) for each in of_phase)
        if wrong and not any(not each.bit_equal or each.orphans for each in kills):
            lost = len(of_phase)  # The responsible kill is unknown: count all.
        records.add(
            "supervised run",
            f"SIGKILL in {phase}" if phase != LAUNCHER else "SIGKILL of the launcher",
            len(of_phase),
            lost,
            case={
                "strategy": arguments.strategy,
                "world_size": arguments.ranks,
                "seed": arguments.seed,
            },
            metrics={"recovery_s": times, **parts} if times else {},
        )
        if times:
            print(f"back in {statistics.median(times):.2f} s, {max(times):.2f} s at worst")


def where(this: Kill) -> str:
    """Returns the phase that a kill counts for: the actual one, not the wanted one."""
    if this.rank is None:
        return LAUNCHER
    if this.wanted in IN_A_SAVE and this.writing == this.wanted:
        return f"checkpoint {this.wanted}"
    return this.phase


def main() -> int:
    """Trains twice, kills in one of the runs, and prints and records the outcome."""
    parser = study_parser(__doc__)
    parser.add_argument("--kills", type=int, default=60, help="after ten resumed steps each")
    parser.add_argument("--launcher-every", type=int, default=12, help="one of so many")
    parser.add_argument("--start-every", type=int, default=5, help="another while ranks start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="ddp")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        config = run_to_disturb(
            place,
            "killed",
            steps=_STEPS_PER_KILL * arguments.kills + 100,
            saves_every=5,
            parallel=ParallelConfig(strategy=arguments.strategy, device="cpu", timeout_s=60),
        )
        reference = dataclasses.replace(config, out=str(place / "never-killed"))
        untouched = Run(reference, arguments.ranks, 0)
        if untouched.process.wait() != 0:
            raise RuntimeError("the run that nobody kills has failed")
        run = Run(config, arguments.ranks, 10 * arguments.kills)
        kills = study(run, arguments)
        code = run.process.wait(_HANG_S)
        wrong = judge(kills, config, reference)
        if code:
            wrong.append(f"the run ended with exit code {code}")
        record(kills, wrong, arguments)
        resumed = sum(each.resumed_steps >= RESUMED_STEPS for each in kills)
        print(f"{len(kills)} kills, {resumed} of them after {RESUMED_STEPS} resumed steps or more")
        for each in wrong:
            print(f"lost: {each}")
        if wrong:
            sys.stderr.write(pathlib.Path(f"{config.out}.log").read_text(errors="replace")[-4000:])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
