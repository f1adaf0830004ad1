"""An end-to-end demo in a few minutes: text, calibration, plan, training, report, sample.

Every step is a command that users could type; it is shown before it runs. The two ranks run on
virtual hosts with a shaped link, or as two processes if virtual hosts are not allowed.
"""

import dataclasses
import itertools
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from paceline.core.errors import PacelineError
from paceline.core.processes import error_tail, start_child
from paceline.core.strategies import StrategyName
from paceline.lab.network import LabError, hosts
from paceline.loop.sweep import progress_text
from paceline.loop.sweep_directory import read_json
from paceline.predict.history import HistoryEntry, history_path, read_history
from paceline.reports.plots.style import save_as
from paceline.reports.plots.training_run import plot_story
from paceline.reports.training_run import read_run
from paceline.training.forecast import forecast
from paceline.training.run_directory import predicted_and_measured
from paceline.training.toml_config import read_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PROMPT = "The for statement"
_RATE, _LINK = "1gbit", "1 Gbit/s"
_RANKS = 2
_SHAPE = {"d_model": 128, "d_ff": 384, "num_layers": 4, "num_heads": 4}
_CONTEXT, _BATCH = 128, 16
_STRATEGIES: tuple[StrategyName, ...] = ("torch_ddp", "ddp", "zero2")
_POLL_S, _PAUSE_S = 0.2, 5.0
_RUN = "run"
_OUTCOME = "outcome.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOutcome:
    """Prediction and measurement of the run, and where it ran."""

    step: HistoryEntry
    """Predicted and measured step time."""
    link: str | None
    """Link rate between the ranks' hosts; None if they share a host."""
    strategy: StrategyName


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstration:
    """The results of a demo: report, plot, sample text and predictions."""

    page: str
    picture: str
    sample: str
    """The model's continuation of the prompt."""
    entries: tuple[HistoryEntry, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Runs the demo in a directory; `say` is called with progress messages."""

    directory: pathlib.Path
    steps: int
    say: Callable[[str], None]

    def run(self) -> Demonstration:
        """Runs all steps of the demo."""
        lab = self._lab()
        run, tokens = str(self.directory / _RUN), str(self.directory / "tokens")
        corpus, page = self._write_text(), self.directory / "demo.html"
        prepare = ["data", "prepare", str(corpus), "--tokenizer", "bytes", "--heldout", "0.1"]
        self._call([*prepare, "--out", tokens])
        config, calibration = self._write_config(tokens), self._calibrate(lab)
        strategy, known = self._plan(config, calibration), read_history(history_path())
        train = ["train", str(config), "--set", f"parallel.strategy={strategy}"]
        train += ["--calibration", str(calibration)]
        self._call([*train, *([] if lab else ["--ranks", str(_RANKS)])], lab, pathlib.Path(run))
        self._call(["report", "run", run, "--out", str(page)])
        generate = ["generate", run, "--prompt", PROMPT, "--tokens", "160", "--temperature", "0.7"]
        entries = predicted_and_measured(read_config(config), known)
        (step,) = [each for each in entries if each.quantity == "step_time_s"]
        outcome = DemoOutcome(step=step, link=_LINK if lab else None, strategy=strategy)
        (self.directory / _OUTCOME).write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
        picture = self.directory / "demo.png"
        save_as(draw_demo(self.directory), picture)
        return Demonstration(
            page=str(page),
            picture=str(picture),
            sample=self._call(generate).strip(),
            entries=(step,),
        )

    def _calibrate(self, lab: Sequence[str]) -> pathlib.Path:
        store = self.directory / "calibration.jsonl"
        sizes = [(f"--{name.replace('_', '-')}", str(size)) for name, size in _SHAPE.items()]
        calibrate = ["calibrate", "--model", "bytes-6M", *itertools.chain(*sizes)]
        calibrate += ["--batch", str(_BATCH // _RANKS), "--context", str(_CONTEXT)]
        calibrate += ["--time-limit-s", "20", "--store", str(store)]
        self._call([*calibrate, *([] if lab else ["--world-size", str(_RANKS)])], lab)
        return store

    def _lab(self) -> list[str]:
        """Returns the arguments that start ranks on two linked hosts; empty if not possible."""
        try:
            with hosts(_RANKS):
                pass
        except LabError as error:
            self.say(f"cannot create virtual hosts, so both ranks run on this host: {error}")
            return []
        return ["lab", "run", "--hosts", str(_RANKS), "--rate", _RATE, "--"]

    def _write_text(self) -> pathlib.Path:
        """Writes the manual that Python's help() prints: half a million characters of English."""
        from pydoc_data.topics import topics  # Slow to import, and only needed here.

        corpus = self.directory / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        for name, text in topics.items():
            (corpus / f"{name.replace('/', '-')}.txt").write_text(text, encoding="utf-8")
        size = sum(map(len, topics.values()))
        self.say(f"text: the manual that Python's help() prints, {size:,} characters")
        return corpus

    def _write_config(self, tokens: str) -> pathlib.Path:
        path = self.directory / "run.toml"
        model = "\n".join(f"{name} = {size}" for name, size in _SHAPE.items())
        path.write_text(
            f'out = "{self.directory / _RUN}"\n\n[model]\npreset = "bytes-6M"\n{model}\n\n'
            f'[data]\nsources = [{{ place = "{tokens}" }}]\ncontext_length = {_CONTEXT}\n\n'
            f"[training]\nsteps = {self.steps}\nbatch_size = {_BATCH}\n\n"
            f"[optimizer]\nlearning_rate = 3e-3\n\n"
            f"[schedule]\nwarmup_steps = {max(1, self.steps // 20)}\n\n"
            f"[evaluation]\nevery_steps = {max(1, self.steps // 8)}\n",
            encoding="utf-8",
        )
        return path

    def _plan(self, config: pathlib.Path, calibration: pathlib.Path) -> StrategyName:
        """Returns the strategy with the shortest predicted step."""
        times: dict[StrategyName, float] = {}
        for name in _STRATEGIES:
            run = read_config(config, (f"parallel.strategy={name}",))
            times[name] = forecast(run, _RANKS, calibration).step_time_s or 0.0
        best = min(times, key=times.__getitem__)
        listed = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in times.items())
        self.say(f"plan: predicted step times: {listed}; using {best}")
        return best

    def _call(
        self, arguments: Sequence[str], lab: Sequence[str] = (), run: pathlib.Path | None = None
    ) -> str:
        """Runs a command and returns its output; reports the progress of a training run."""
        shown = ["paceline", *lab, *(["paceline"] if lab else []), *arguments]
        self.say(f"$ {shlex.join(shown)}")
        python = [sys.executable, "-m", "paceline"]
        command = [*python, *lab, *(python if lab else []), *arguments]
        log = self.directory / "log.txt"
        output = self.directory / "output.txt"
        with log.open("ab") as errors, output.open("wb") as results:
            process = start_child(command, stdout=results, stderr=errors)
            try:
                self._follow(process, run)
            finally:
                process.kill()
                process.wait()
        if process.returncode:
            raise PacelineError(f"{error_tail(log, process.returncode)}; the full log is {log}")
        return output.read_text(encoding="utf-8")

    def _follow(self, process: "subprocess.Popen[bytes]", run: pathlib.Path | None) -> None:
        said = time.monotonic()
        while process.poll() is None:
            time.sleep(_POLL_S)
            if run is not None and time.monotonic() - said > _PAUSE_S:
                said = time.monotonic()
                self.say(f"  {progress_text(run)}")


def read_outcome(directory: pathlib.Path) -> DemoOutcome:
    """Returns the outcome of a finished demo."""
    return read_json(directory / _OUTCOME, DemoOutcome, "not the outcome of a demo")


def draw_demo(directory: pathlib.Path) -> "Figure":
    """Plots the run of a demo with the predicted band."""
    outcome = read_outcome(directory)
    step = outcome.step
    place = "on one host"
    if outcome.link is not None:
        place = f"on two emulated hosts with a link of {outcome.link}"
    subtitle = (
        f"{step.parameters:,} parameters, {outcome.strategy} {place}, "
        f"{step.world_size} cores of {step.hardware}"
    )
    return plot_story(read_run(directory / _RUN), step, subtitle)
