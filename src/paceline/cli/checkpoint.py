"""``paceline checkpoint``: lists, verifies, exports and imports checkpoints."""

import dataclasses
import pathlib
import sys
from typing import Annotated, Literal

import tyro

from paceline.cli.output import OutputOptions, Place, say, transfer_progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListCommand:
    """List the checkpoints of a run, the oldest first."""

    place: Place
    """Where the run saves its checkpoints."""
    output: OutputOptions

    def run(self) -> int:
        """Prints one line per checkpoint."""
        from paceline.checkpoint.catalog import list_checkpoints
        from paceline.reports.tables.training_run import checkpoints_table

        found = list_checkpoints(self.place)
        table = checkpoints_table(found, self.place) if found else f"{self.place}: no checkpoints"
        self.output.show(found, table)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Read entire checkpoints and check them against the digests in their manifests."""

    place: Place
    """Where the run saves its checkpoints."""
    step: int | None = None
    """Verify only the checkpoint of this step; by default, all checkpoints."""
    output: OutputOptions

    def run(self) -> int:
        """Prints findings; returns 1 if there are any."""
        from paceline.checkpoint.catalog import verify_checkpoint
        from paceline.checkpoint.errors import CheckpointError
        from paceline.checkpoint.storage import open_checkpoints

        steps = sorted(open_checkpoints(self.place).steps()) if self.step is None else [self.step]
        if not steps:
            raise CheckpointError(
                f"{self.place}: no checkpoints to verify; give the place where a run saves them"
            )
        num_wrong = 0
        for step in steps:
            with transfer_progress(f"step {step}") as progress:
                findings = verify_checkpoint(self.place, step, progress)
                num_wrong += self.output.findings(findings)
        if not num_wrong:
            what = "checkpoint is" if len(steps) == 1 else "checkpoints are"
            self.output.show((), f"{self.place}: {len(steps):,} {what} intact")
        return 1 if num_wrong else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Export a checkpoint as a Hugging Face model that transformers and vLLM can load."""

    place: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINTS")]
    """Directory of a run, or the place where its checkpoints are."""
    out: pathlib.Path
    """Directory to create."""
    step: int | None = None
    """Step of the checkpoint; by default, the newest complete checkpoint."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype to round the weights to; by default, they keep the dtype of the checkpoint."""

    def run(self) -> int:
        """Exports the checkpoint and prints its step and dtype."""
        from paceline.training.exchange import export_model, open_saved_model

        saved = open_saved_model(self.place, self.step)
        with transfer_progress(f"step {saved.step}") as progress:
            config = export_model(saved, self.out, dtype=self.dtype, progress=progress)
        (architecture,) = config["architectures"]
        sys.stdout.write(f"{self.out}: step {saved.step:,} as {architecture}, {config['dtype']}\n")
        if saved.tokenizer_json is None:
            say(f"{self.out} has no tokenizer: there is no tokenizer.json next to the checkpoints")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportCommand:
    """Import a Hugging Face Llama model as a run, and print a config to train it further."""

    directory: Annotated[pathlib.Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directory of the model: config.json, safetensors, tokenizer.json."""
    out: pathlib.Path
    """Directory of the run to create."""

    def run(self) -> int:
        """Imports the model and prints a config to stdout."""
        from paceline.training.exchange import import_model
        from paceline.training.toml_config import config_template

        sys.stdout.write(config_template(import_model(self.directory, self.out)))
        return 0
