"""Options and output of all verbs: results on stdout, everything else on stderr.

An expected error of a verb becomes one line on stderr and an exit code.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import tyro

from paceline.core.errors import DISK_FULL, PacelineError, UsageError
from paceline.core.units import format_duration, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from paceline.core.finding import Finding
    from paceline.data.audit import AuditFinding
    from paceline.records import Record


DEFAULT_STORE = pathlib.Path("paceline-records.jsonl")
AppendedStore = Annotated[
    pathlib.Path, tyro.conf.arg(help="JSON Lines file to append the records to.")
]
ReadStore = Annotated[pathlib.Path, tyro.conf.arg(help="JSON Lines file to read the records from.")]

_PLAIN_PAUSE_S = 5.0

_Options = TypeVar("_Options")
Flat = Annotated[_Options, tyro.conf.arg(name="")]
"""Options that the help lists with the command's own, without a separate heading."""
Place = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR|s3://...")]
"""Location of a dataset or of a run's checkpoints."""


def given_flags(options: Any, names: Sequence[str]) -> list[str]:
    """Returns the flags, as they are typed, of those fields that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return [
        f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != defaults[name]
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Flags of every command that prints records."""

    json: bool = False
    """Print results as JSON Lines on stdout, and nothing else."""

    def show(self, rows: Iterable[object], *shown: object) -> None:
        """Prints each row as JSON with --json, and otherwise tables, or text verbatim."""
        if self.json:
            for row in rows:
                print_json(row)
            return
        for each in shown:
            if isinstance(each, str):
                sys.stdout.write(f"{printable(each)}\n")
            else:
                stdout_console().print(each)

    def keep(self, records: "Iterable[Record]", store: pathlib.Path | None) -> "Iterator[Record]":
        """Appends each record to a store, prints it with --json, and yields it, one at a time."""
        from paceline.records import RecordStore

        for record in records:
            if store is not None:
                RecordStore(store).append(record)
            if self.json:
                print_json(record)
            yield record

    def tables(self, records: "Sequence[Record]") -> None:
        """Prints a table per kind of measurement, with predictions; prints nothing with --json."""
        if self.json:
            return
        from paceline.records.kinds import PREDICTION
        from paceline.reports.tables.predictions import with_predictions
        from paceline.reports.tables.table import records_table

        for kind in dict.fromkeys(record.kind for record in records if record.kind != PREDICTION):
            chosen = [record for record in records if record.kind == kind]
            self.show((), records_table(with_predictions(chosen, records)))

    def findings(self, findings: "Iterable[Finding | AuditFinding]") -> int:
        """Prints each finding as soon as it is found, and returns their number."""
        num_found = 0
        for finding in findings:
            num_found += 1
            self.show([finding], str(finding))
        return num_found


def parse_figure(words: list[str]) -> pathlib.Path:
    """Parses the path of a figure, whose ending names the format."""
    path = pathlib.Path(words[0])
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--figure {path} must end in .png or .svg")
    return path


FigurePath = Annotated[
    pathlib.Path,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=parse_figure,
        is_instance=lambda value: isinstance(value, pathlib.Path),
        str_from_instance=lambda path: [str(path)],
    ),
]
"""A file that ends in .png or .svg."""


def print_json(value: object) -> None:
    """Prints a value as a line of JSON, and flushes so that pipes receive it immediately."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def require_positive(options: dict[str, float | None]) -> None:
    """Raises an error for an option that is given but not positive and finite."""
    for flag, value in options.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{flag} is {value:g}; it must be positive and finite")


def stdout_console() -> "Console":
    """Returns a console for results; rich handles NO_COLOR and pipes."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False)


def stderr_console() -> "Console":
    """Returns a console for progress and messages."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False)


def say(remark: str) -> None:
    """Prints a line on stderr verbatim: paths and file contents are not markup."""
    stderr_console().print(printable(remark), markup=False, soft_wrap=True)


class CaseProgress:
    """A progress bar over the cases of a sweep and the steps of the current case."""

    def __init__(self, bar: "Progress", num_cases: int) -> None:
        self._bar = bar
        self._cases = bar.add_task("cases", total=num_cases)
        self._steps = bar.add_task("steps", total=None)

    def step(self, completed: int, total: int) -> None:
        """Updates the progress of the current case."""
        self._bar.update(self._steps, completed=completed, total=total)

    def next_case(self) -> None:
        """Marks the current case as done."""
        self._bar.advance(self._cases)
        self._bar.reset(self._steps, total=None)


class PlainProgress:
    """Progress as lines of text, for the stderr of a rank under a launcher."""

    def __init__(self, num_cases: int) -> None:
        self._num_cases = num_cases
        self._num_done = 0
        self._began = time.monotonic()
        self._last_s = -_PLAIN_PAUSE_S

    def step(self, completed: int, total: int) -> None:
        """Reports the progress of the current case."""
        self._say(f", step {completed} of {total}", completed / total if total else 0.0)

    def next_case(self) -> None:
        """Reports that the current case is done."""
        self._num_done += 1
        self._say("", 0.0)

    def _say(self, within_case: str, part_of_case: float) -> None:
        elapsed_s = time.monotonic() - self._began
        if elapsed_s - self._last_s < _PLAIN_PAUSE_S:
            return
        self._last_s = elapsed_s
        done = (self._num_done + part_of_case) / self._num_cases
        left = f", about {format_duration(elapsed_s / done - elapsed_s)} left" if done else ""
        sys.stderr.write(
            f"paceline: {self._num_done} of {self._num_cases} cases done{within_case}, "
            f"{elapsed_s:.0f} s{left}\n"
        )
        sys.stderr.flush()


@contextlib.contextmanager
def case_progress(num_cases: int) -> "Iterator[CaseProgress | PlainProgress]":
    """Shows progress on stderr while open: a bar on a terminal, lines for rank 0 elsewhere."""
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    if rank == "0" and not stderr_console().is_terminal:
        yield PlainProgress(num_cases)
        return
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with _bar(*columns, is_shown=rank in (None, "0")) as bar:
        yield CaseProgress(bar, num_cases)


@contextlib.contextmanager
def work_progress(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Shows a task, and its remaining time if its parts are counted; yields a callback per part."""
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

    counted = () if total is None else (MofNCompleteColumn(), TimeRemainingColumn())
    with _bar(TimeElapsedColumn(), *counted) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def transfer_progress(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Shows transferred bytes, rate and remaining time, on a terminal; yields a callback."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(*columns: "ProgressColumn", is_shown: bool = True) -> "Progress":
    """Returns a bar with these columns, shown only on a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn

    console = stderr_console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=console,
        disable=not (is_shown and console.is_terminal),
        transient=True,
    )


def guarded(run: Callable[[], int]) -> int:
    """Runs a verb and returns its exit code; prints expected errors as one line."""
    try:
        exit_code = run()
        sys.stdout.flush()
    except PacelineError as error:
        sys.stderr.write(f"paceline: error: {printable(str(error))}\n")
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "paceline").partition(".")[0]
        if package == "paceline":
            raise
        sys.stderr.write(f"paceline: error: {_missing(package)}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("paceline: interrupted\n")
        return 130
    except BrokenPipeError:
        _close_stdout()
        return 141
    except OSError as error:
        if error.filename is None and error.errno not in DISK_FULL:
            raise
        if error.filename is None:  # stdout may be what is full.
            _close_stdout()
        where = f"{error.filename}: " if error.filename is not None else ""
        remedy = "free disk space" if error.errno in DISK_FULL else "name another path"
        sys.stderr.write(f"paceline: error: {printable(where)}{error.strerror}; {remedy}\n")
        return 1
    return exit_code


def _close_stdout() -> None:
    """Discards what is left to print: Python flushes stdout once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _missing(package: str) -> str:
    """Returns the error message for a missing package, with a remedy."""
    if package == "torch":
        return (
            "torch is not installed, and this command needs it; pip install torch (the CPU build "
            "if there is no GPU); plan, scaling, data, report and lab work without torch"
        )
    return f"the package {package} is not installed; pip install {package}"
