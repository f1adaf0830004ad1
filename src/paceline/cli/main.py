"""The table of verbs and the entry point, with error handling common to all verbs.

Results go to stdout, everything else to stderr.
Neither this module nor any module that it imports may load torch or numpy: parsing flags needs the
types of a verb, but not its implementation.
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

import paceline
from paceline.cli import (
    bench,
    calibrate,
    checkpoint,
    compare,
    data,
    environment,
    generate,
    profile,
    report,
    train,
)
from paceline.cli.lab import LabCommand
from paceline.cli.output import guarded
from paceline.cli.plan.verb import PlanCommand
from paceline.cli.scaling.loop import LoopCommand
from paceline.cli.scaling.sweep import SweepCommand
from paceline.cli.scaling.verb import ScalingCommand
from paceline.cli.start import DemoCommand, goals_text, require_known_verb

_DESCRIPTION = (
    "Plan, run and explain the data-parallel training of language models.\n"
    "--version prints the version. Exit codes: 0 done, 1 failed, 2 usage error, 130 interrupted, "
    "141 stdout was closed, 143 a training run was asked to stop and has saved a checkpoint."
)

Verb = (
    Annotated[DemoCommand, tyro.conf.subcommand("demo")]
    | Annotated[environment.EnvironmentCommand, tyro.conf.subcommand("env")]
    | Annotated[bench.BenchCommand, tyro.conf.subcommand("bench")]
    | Annotated[profile.ProfileCommand, tyro.conf.subcommand("profile")]
    | Annotated[calibrate.CalibrateCommand, tyro.conf.subcommand("calibrate")]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[ScalingCommand, tyro.conf.subcommand("scaling")]
    | Annotated[SweepCommand, tyro.conf.subcommand("sweep")]
    | Annotated[LoopCommand, tyro.conf.subcommand("loop")]
    | Annotated[data.DataCommand, tyro.conf.subcommand("data")]
    | Annotated[checkpoint.CheckpointCommand, tyro.conf.subcommand("checkpoint")]
    | Annotated[train.TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[generate.GenerateCommand, tyro.conf.subcommand("generate")]
    | Annotated[LabCommand, tyro.conf.subcommand("lab")]
    | Annotated[compare.CompareCommand, tyro.conf.subcommand("compare")]
    | Annotated[report.ReportCommand, tyro.conf.subcommand("report")]
)

_PARSING = (
    tyro.conf.OmitArgPrefixes,
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.DisallowNone,
    tyro.conf.FlagCreatePairsOff,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, runs its verb, and returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        sys.stdout.write(f"paceline {paceline.__version__}\n")
        return 0
    if not arguments:
        sys.stdout.write(goals_text())
        return 0
    return guarded(lambda: parse(arguments).run())


def parse(arguments: Sequence[str]) -> Verb:
    """Parses a command line into a verb with its options; raises or exits if it is invalid."""
    require_known_verb(arguments, Verb)
    command: Verb = tyro.cli(
        Verb, prog="paceline", description=_DESCRIPTION, args=arguments, config=_PARSING
    )
    return command
