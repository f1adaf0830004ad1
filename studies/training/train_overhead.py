"""Measures the trainer's overhead over a bare loop, per step and at startup.

Steps: two ranks train the same model twice, once through `paceline.training.loop.train` and once in
a hand-written loop, with the same strategy, optimizer, batches and clipping. Their steps alternate.
The trainer's time includes everything from one step to the next: data, metrics rows, and the
agreement of the ranks.

Startup: the time from starting a process to the end of its first step, for `paceline train` and for
a bare script, which alternate.

Appends two `comparison` records to the store: step and start.

    python -m studies.training.train_overhead results/train-overhead.jsonl
"""

import dataclasses
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.optim import AdamW

from paceline.data.loader.torch_batches import TorchLoader
from paceline.models import TransformerLM, next_token_loss
from paceline.parallel import Session, run_ranks
from paceline.parallel.strategies import apply_strategy, clip_grad_norm, make_optimizer
from paceline.training.config import CheckpointConfig, RunConfig, ScheduleConfig
from paceline.training.forecast import layout_of
from paceline.training.loop import train
from paceline.training.metrics import MetricsFile, MetricsRow, StepRow
from paceline.training.observers import FileObserver
from paceline.training.parallelize import build
from paceline.training.run import StopRequest
from paceline.training.run_checkpointer import RunCheckpointer
from studies.harness.runs import local_session, write_config
from studies.harness.study import PACELINE
from studies.harness.turns import interleaved
from studies.training.turns import RANKS, record_steps, steps_parser, steps_run

WARMUP = 3
BARE = """
import pathlib, sys
import numpy as np
import torch
from paceline.models import TransformerLM, next_token_loss
from paceline.training.toml_config import read_config

config = read_config(pathlib.Path(sys.argv[1]))
tokens = torch.from_numpy(np.fromfile(sys.argv[2], "<u2").astype(np.int64))
model = TransformerLM(config.model.shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
length = config.data.context_length
starts = torch.randint(len(tokens) - length, (config.training.batch_size, 1))
batch = tokens[starts + torch.arange(length + 1)]
next_token_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
optimizer.step()
print("done", flush=True)
"""


class BareLoop:
    """A hand-written training loop."""

    def __init__(self, config: RunConfig, session: Session) -> None:
        torch.manual_seed(config.training.seed)
        self._strategy = config.parallel.strategy
        self._model = apply_strategy(
            self._strategy,
            TransformerLM(config.model.shape),
            config.parallel.bucket_size_for(self._strategy),
        )
        self._optimizer = make_optimizer(
            self._strategy,
            self._model,
            AdamW,
            lr=config.optimizer.learning_rate,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        with TorchLoader(
            config.loader(), rank=session.rank, world_size=session.world_size
        ) as loader:
            self._batches = [next(loader) for _ in range(4)]
        self._number = 0

    def step(self) -> float:
        """Runs one step and returns its seconds."""
        started = time.perf_counter()
        batch = self._batches[self._number % len(self._batches)]
        self._number += 1
        loss = next_token_loss(self._model(batch.tokens), batch.targets)
        loss.backward()
        clip_grad_norm(self._model, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - started


class TakeTurns:
    """Runs a bare step after each of the trainer's, and collects the seconds of both."""

    def __init__(self, bare: BareLoop, metrics: FileObserver | None) -> None:
        self._bare = bare
        self._metrics = metrics
        self.trainer_s: list[float] = []
        self.bare_s: list[float] = []
        self._began = time.perf_counter()

    def log(self, row: MetricsRow) -> None:
        """Receives a row from the trainer; a step row also triggers a bare step."""
        if self._metrics is not None:
            self._metrics.log(row)
        if isinstance(row, StepRow):
            self.trainer_s.append(time.perf_counter() - self._began)
            dist.barrier()
            self.bare_s.append(self._bare.step())
            dist.barrier()
        self._began = time.perf_counter()

    def close(self) -> None:
        """Does nothing; rows are written immediately."""


def run_both(rank: int, world_size: int, config: RunConfig) -> dict[str, list[float]]:
    """Returns the seconds of the trainer's steps and of the bare steps."""
    session = local_session(rank, world_size)
    pathlib.Path(config.out).mkdir(parents=True, exist_ok=True)
    metrics = FileObserver(MetricsFile(f"{config.out}/metrics.jsonl")) if rank == 0 else None
    turns = TakeTurns(BareLoop(config, session), metrics)
    checkpointer = RunCheckpointer(config, session)
    with StopRequest(config.checkpoint.grace_s) as stop:
        train(
            config,
            session,
            build(config, layout_of(config, session.world_size), session),
            checkpointer,
            turns,
            lambda: stop.received is not None,
        )
    return {"trainer": turns.trainer_s[WARMUP:], "bare": turns.bare_s[WARMUP:]}


def starts(place: pathlib.Path, config: RunConfig, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds to the end of the first step, for the trainer and for a bare script."""
    short = dataclasses.replace(
        config,
        out=str(place / "started"),
        training=dataclasses.replace(config.training, steps=10_000),
        logging=dataclasses.replace(config.logging, every_steps=1),
    )
    toml = str(write_config(short))
    tokens = str(place / "tokens" / "train" / "00000000.tokens")
    bare = (sys.executable, "-c", BARE, toml, tokens)
    ways = {
        "trainer": lambda: _seconds_until((*PACELINE, "train", toml), "step 1 "),
        "bare": lambda: _seconds_until(bare, "done"),
    }
    return interleaved(ways, rounds, warmup=0)


def _seconds_until(command: Sequence[str], beginning: str) -> float:
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(beginning):
                seconds = time.perf_counter() - started
                process.kill()
                return seconds
    raise RuntimeError(f"{' '.join(command)} ended before its first step")


def main() -> int:
    """Measures, prints and records the overhead."""
    parser = steps_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--starts", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = pathlib.Path(directory)
        # The run neither evaluates nor saves before its end.
        config = steps_run(
            arguments,
            place,
            arguments.rounds + WARMUP,
            schedule=ScheduleConfig(name="constant", warmup_steps=0),
            checkpoint=CheckpointConfig(every_steps=10**6),
        )
        steps = run_ranks(run_both, RANKS, config, timeout_s=3600)[0]
        first = starts(place, config, arguments.starts)
    names = {"subject": "paceline train, step", "baseline": "bare loop"}
    record_steps(arguments, steps, names)
    alone = {"subject": "paceline train, start", "operation": "none", "world_size": 1}
    record_steps(arguments, first, names | alone)
    return 0


if __name__ == "__main__":
    sys.exit(main())
