"""Writes the files of a layout: plan.json, torchtitan.toml, megatron.args, commands.sh."""

import pathlib

from paceline.planner.search.choice import Choice
from paceline.planner.search.exports.megatron import megatron_flags, megatron_notes
from paceline.planner.search.exports.paceline_plan import paceline_plan
from paceline.planner.search.exports.torchtitan import torchtitan_config, torchtitan_refusal
from paceline.planner.search.question import SearchQuestion
from paceline.records import encode_plan


def torchrun_line(choice: Choice, devices_per_host: int, program: str) -> str:
    """Returns the torchrun command for every host."""
    per_host = min(choice.devices, devices_per_host)
    hosts = -(-choice.devices // per_host)
    where = (
        "--standalone" if hosts == 1 else "--rdzv-backend c10d --rdzv-endpoint $FIRST_HOST:29500"
    )
    return f"torchrun --nnodes {hosts} --nproc-per-node {per_host} {where} {program}"


def write_exports(
    directory: pathlib.Path,
    choice: Choice,
    question: SearchQuestion,
    hardware: str,
    *,
    is_runnable: bool,
) -> list[pathlib.Path]:
    """Writes the configs and commands of a layout, and returns the paths.

    If torchtitan does not support the layout, its config is omitted and the commands file states
    the reason.

    Args:
        directory: Output directory, created if missing.
        choice: The layout.
        question: The search question.
        hardware: Device name in the hardware table.
        is_runnable: Whether Paceline's trainer runs the layout.
    """
    flags = megatron_flags(choice, question)
    notes = [f"# {note}" for note in megatron_notes(choice, question)]
    programs = {
        "torchtitan": "-m torchtitan.train --job.config_file torchtitan.toml",
        "Megatron-LM": "pretrain_gpt.py $(grep -v '^#' megatron.args)",
    }
    if is_runnable:
        programs = {"Paceline": "-m paceline train run.toml --plan plan.json", **programs}
    refusal = torchtitan_refusal(choice, question)
    if refusal is not None:
        del programs["torchtitan"]
    commands = [
        f"# {name}\n{torchrun_line(choice, question.devices_per_host, program)}\n"
        for name, program in programs.items()
    ] + ([] if refusal is None else [f"# {refusal}\n"])
    texts = {
        "plan.json": encode_plan(paceline_plan(choice, question, hardware)).decode() + "\n",
        "megatron.args": "\n".join([f"# {choice.name}", *notes, *flags]) + "\n",
        "commands.sh": "\n".join(commands),
    }
    if refusal is None:
        texts["torchtitan.toml"] = torchtitan_config(choice, question)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths
