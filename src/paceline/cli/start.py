"""What a newcomer sees first: goals with their commands, and the demo."""

import dataclasses
import pathlib

from paceline.cli.output import Flat, OutputOptions, say
from paceline.core.errors import UsageError

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Train a small model over an emulated network, and compare it with its prediction.

    Prepares the text of Python's manual, calibrates this machine, plans, trains on two ranks with
    a 1 Gbit/s link between them, writes an HTML page and generates a sample, in under five minutes
    on two cores. Shows every command before running it.
    """

    out: pathlib.Path = pathlib.Path("demo")
    """Directory for all files; demo.html in it is the page to open."""
    steps: int = 400
    """Training steps."""
    output: Flat[OutputOptions]

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError("--steps must be at least 1")

    def run(self) -> int:
        """Runs the demo and prints its results."""
        from paceline.core.processes import termination_as_exit
        from paceline.loop.demo import PROMPT, Demo
        from paceline.reports.tables.predictions import outcome_table

        if self.out.exists():
            raise UsageError(f"{self.out} already exists; name another directory with --out")
        self.out.mkdir(parents=True, exist_ok=True)
        with termination_as_exit():
            made = Demo(directory=self.out, steps=self.steps, say=say).run()
        table = outcome_table(made.entries, "Predicted and measured")
        text = f"{PROMPT} → {made.sample}\n\npage: {made.page}\npicture: {made.picture}"
        self.output.show([made], table, text)
        return 0
