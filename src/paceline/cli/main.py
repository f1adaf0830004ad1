"""The table of commands and the entry point, with error handling common to all commands.

Results go to stdout, everything else to stderr.
Neither this module nor any module that it imports may load torch or numpy: parsing flags needs the
types of a command, but not its implementation.
"""

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import tyro

import paceline
from paceline.cli import (
    bench,
    checkpoint,
    data,
    environment,
    generate,
    lab,
    loop,
    plan,
    plan_search,
    plan_step,
    profile,
    report,
    scaling,
    sweep,
    train,
)
from paceline.cli.output import guarded
from paceline.core.errors import UsageError, did_you_mean

_DESCRIPTION = (
    "Plan, run and explain the data-parallel training of language models.\n"
    "--version prints the version. Exit codes: 0 done, 1 failed, 2 usage error, 130 interrupted, "
    "141 stdout was closed, 143 a training run was asked to stop and has saved a checkpoint, 129 "
    "the same because its terminal was closed."
)

COMMANDS: Mapping[str, Any] = {
    "demo": loop.DemoCommand,
    "env": environment.EnvironmentCommand,
    "bench": (bench.COMMANDS, "Measure one part of training and append the records to a store."),
    "profile": (
        {
            "ddp": profile.ProfileDdpCommand,
            "layout": profile.ProfileLayoutCommand,
            "step": profile.ProfileStepCommand,
            "trace": profile.TraceCommand,
        },
        "Show where the time and memory of a step go, on any machine.",
    ),
    "calibrate": bench.CalibrateCommand,
    "plan": (
        {
            "account": plan.AccountCommand,
            "overhead": plan.OverheadCommand,
            "memory": plan.MemoryCommand,
            "step": plan_step.PlanStepCommand,
            "backtest": plan_step.BacktestCommand,
            "goodput": plan.GoodputCommand,
            "search": plan_search.SearchCommand,
            "budget": plan_search.BudgetCommand,
            "calibrate": plan_step.CalibrateRowsCommand,
        },
        "Predict time, memory, layouts and cost of training by arithmetic, before you run "
        "anything.",
    ),
    "scaling": (
        {"fit": scaling.FitCommand, "check": scaling.CheckCommand, "design": scaling.DesignCommand},
        "Scaling laws: fit runs, check claims, design sweeps.",
    ),
    "sweep": sweep.SweepCommand,
    "loop": loop.LoopCommand,
    "data": (
        {
            "tokenizer": data.TokenizerCommand,
            "prepare": data.PrepareCommand,
            "show": data.ShowCommand,
            "verify": data.VerifyCommand,
            "export": data.ExportCommand,
            "audit": data.AuditCommand,
        },
        "Prepare training data: train a tokenizer, write token shards, inspect and verify them.",
    ),
    "checkpoint": (
        {
            "list": checkpoint.ListCommand,
            "verify": checkpoint.VerifyCommand,
            "export": checkpoint.ExportCommand,
            "import": checkpoint.ImportCommand,
        },
        "List, verify, export and import checkpoints of training runs.",
    ),
    "train": train.TrainCommand,
    "generate": generate.GenerateCommand,
    "lab": (
        {"run": lab.RunCommand, "slurm": lab.SlurmCommand, "chaos": lab.ChaosCommand},
        "Emulate a cluster on this machine: a slow network, a Slurm scheduler, faults.",
    ),
    "compare": report.CompareCommand,
    "report": (
        {
            "table": report.TableCommand,
            "plot": report.PlotCommand,
            "build": report.BuildCommand,
            "run": report.RunCommand,
        },
        "Make tables, plots and reports from records, and an HTML report of a training run.",
    ),
}
"""Every command by name: the type of its options, or commands of its own, with a description."""

_GOALS = (
    ("see it work, in five minutes", "paceline demo"),
    ("train a model on my text", "paceline data prepare corpus --tokenizer bytes --out tokens"),
    ("", "paceline train init > run.toml"),
    ("", "paceline train run.toml --ranks 2"),
    ("turn a budget of FLOPs into a model", "paceline loop run.toml --budget 1e13"),
    ("know which layout is fastest", "paceline plan search --model llama3-70B --devices 64"),
    ("know whether a model fits in memory", "paceline plan memory --model large --device h100-sxm"),
    ("find out why a step is slow", "paceline profile step --model small --out profile"),
    ("compare DDP, ZeRO and FSDP", "paceline bench ddp --strategies torch_ddp ddp zero2"),
    ("know how large a model to train", "paceline scaling fit runs.jsonl --budgets 1e20"),
    ("know what failures cost at scale", "paceline plan goodput --devices 16384"),
    ("check this machine", "paceline env --self-test"),
    ("emulate a slow network", "paceline lab run --hosts 2 --rate 1gbit -- paceline bench ddp"),
)
_COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")
"""Flags of tyro that make a shell complete the commands."""
_PARSING = (
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.DisallowNone,
    tyro.conf.FlagCreatePairsOff,
)


class Command(Protocol):
    """A command with its options."""

    def run(self) -> int:
        """Runs the command and returns its exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs its command, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        sys.stdout.write(f"paceline {paceline.__version__}\n")
        return 0
    if not arguments:
        sys.stdout.write(goals_text())
        return 0
    return guarded(lambda: parse(arguments).run())


def goals_text() -> str:
    """Returns the goals with their commands, formatted for 80 columns."""
    lines = [
        "Paceline plans, runs and explains the data-parallel training of language models.",
        "",
        "I want to",
    ]
    for goal, command in _GOALS:
        if goal:
            lines.append(f"  {goal}:")
        lines.append(f"      {command}")
    lines += ["", "paceline --help lists all commands; paceline COMMAND --help shows its options."]
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str]) -> Command:
    """Parses a command line into a command with its options; raises or exits if it is invalid."""
    _require_known(arguments)
    kind = _union(COMMANDS, arguments)
    command: Command = tyro.cli(
        kind, prog="paceline", description=_DESCRIPTION, args=arguments, config=_PARSING
    )
    return command


def _require_known(arguments: Sequence[str]) -> None:
    """Raises an error for a word in the position of a command that is not one."""
    known, path = COMMANDS, "paceline"
    for word in arguments:
        if word.startswith("-"):
            return
        if word not in known:
            listed = ", ".join(known)
            raise UsageError(
                f"{path}: no command {word!r}; {did_you_mean(word, known)}known: {listed}"
            )
        kind, _description = _kind_of(known[word])
        if not isinstance(kind, Mapping):
            return
        known, path = kind, f"{path} {word}"


def _union(commands: Mapping[str, Any], arguments: Sequence[str]) -> Any:
    """Returns the union of the commands' types, each annotated with its name, as tyro needs it.

    Only the command that the arguments name has its options, except in scripts that complete
    commands in a shell. tyro shows no more of the others than their descriptions, and reading the
    options of every command would take most of the time of ``paceline --help``.
    """
    word, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    is_whole = word.startswith(_COMPLETION)
    named = []
    for name, command in commands.items():
        kind, description = _kind_of(command)
        if name != word and not is_whole:
            description = description or inspect.getdoc(kind)
            kind = dataclasses.make_dataclass(name, [])
        elif isinstance(kind, Mapping):
            kind = _union(kind, arguments if is_whole else rest)
        named.append(Annotated[kind, tyro.conf.subcommand(name, description=description)])
    return functools.reduce(operator.or_, named)


def _kind_of(command: Any) -> tuple[Any, str | None]:
    return command if isinstance(command, tuple) else (command, None)
