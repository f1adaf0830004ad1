"""Tests that exports express a layout in the options of the target program."""

import dataclasses
import pathlib
import tomllib
from typing import Any

from paceline.core import ModelShape, model_preset
from paceline.core.plan import Estimate, ParallelLayout
from paceline.core.specs import BatchShape
from paceline.planner.search.exports import (
    megatron_flags,
    megatron_notes,
    torchrun_line,
    torchtitan_config,
    write_exports,
)
from paceline.planner.search.search import Candidate
from paceline.planner.search.spec import SearchSpec
from paceline.records import decode_plan
from tests.unit.planner.search.search_cases import spec

WIDE = ParallelLayout(
    replicate=4,
    shard=32,
    sharding="optimizer",
    tensor=8,
    sequence_parallel=True,
    pipeline=16,
    pipeline_interleave=2,
)


def _asked(shape: ModelShape | None = None, **changes: Any) -> SearchSpec:
    return spec(
        shape=shape or model_preset("llama3-405B"),
        context_length=8192,
        global_batch=2048,
        num_devices=16_384,
        devices_per_host=8,
        **changes,
    )


def _choice(layout: ParallelLayout, passes: int = 16, micro_batch: int = 1) -> Candidate:
    return Candidate(
        layout=layout,
        batch=BatchShape(num_sequences=micro_batch, context_length=8192, accumulation_steps=passes),
        devices=layout.world_size,
        step_time_s=Estimate(value=6.0, low=5.0, high=7.0),
        terms_s={"compute_s": 6.0},
        memory_bytes={"states": 40e9, "activations": 20e9, "working": 0.0},
        capacity_bytes=80e9,
        tokens_per_s=1e6,
        mfu=0.4,
        outside=(),
    )


def test_megatron_flags() -> None:
    flags = megatron_flags(_choice(WIDE), _asked())
    assert set(flags) >= {
        "--num-layers 126",
        "--num-query-groups 8",
        "--tensor-model-parallel-size 8",
        "--sequence-parallel",
        "--pipeline-model-parallel-size 16",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--account-for-embedding-in-pipeline-split",
        "--use-distributed-optimizer",
        "--num-distributed-optimizer-instances 4",
        "--micro-batch-size 1",
        "--global-batch-size 2048",
        "--bf16",
    }
    assert not any("recompute" in flag for flag in flags)
    assert "pads" in " ".join(megatron_notes(_choice(WIDE), _asked()))


def test_megatron_shards_parameters_with_its_fsdp() -> None:
    layout = ParallelLayout(shard=8, sharding="parameters", activation_checkpointing="full")
    flags = megatron_flags(_choice(layout), _asked(model_preset("llama3-8B")))
    assert "--data-parallel-sharding-strategy optim_grads_params" in flags
    assert "--recompute-granularity full" in flags
    assert "--account-for-loss-in-pipeline-split" not in flags


def test_torchtitan_config() -> None:
    config = tomllib.loads(torchtitan_config(_choice(WIDE), _asked()))
    assert config["model"]["flavor"] == "405B"
    assert config["training"]["local_batch_size"] == 16
    parallel = config["parallelism"]
    assert parallel["data_parallel_shard_degree"] == 32
    assert parallel["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parallel["pipeline_parallel_layers_per_stage"] * 16 * 2 == 126 + 2
    assert "no ZeRO-1" in torchtitan_config(_choice(WIDE), _asked())


def test_float8_is_said_in_both() -> None:
    asked = _asked(float8_matmuls=True)
    assert "--fp8-format hybrid" in megatron_flags(_choice(WIDE), asked)
    assert tomllib.loads(torchtitan_config(_choice(WIDE), asked))["model"]["converters"] == [
        "float8"
    ]


def test_torchtitan_accumulates_without_stages() -> None:
    layout = ParallelLayout(shard=64, sharding="parameters", activation_checkpointing="selective")
    config = tomllib.loads(torchtitan_config(_choice(layout, passes=4, micro_batch=2), _asked()))
    assert config["training"]["local_batch_size"] == 2
    assert config["parallelism"]["fsdp_reshard_after_forward"] == "always"
    assert config["activation_checkpoint"]["mode"] == "selective"


def test_lines_for_one_host_and_for_many() -> None:
    many = torchrun_line(_choice(WIDE), 8, "train.py")
    assert many.startswith("torchrun --nnodes 2048 --nproc-per-node 8 --rdzv-backend c10d")
    alone = _choice(ParallelLayout(replicate=4))
    assert torchrun_line(alone, 8, "train.py") == (
        "torchrun --nnodes 1 --nproc-per-node 4 --standalone train.py"
    )


def test_files_are_written_and_read_again(tmp_path: pathlib.Path) -> None:
    choice = _choice(WIDE)
    paths = write_exports(tmp_path / "plan", choice, _asked(), "h100-sxm", is_runnable=False)
    names = {path.name for path in paths}
    assert names == {"plan.json", "torchtitan.toml", "megatron.args", "commands.sh"}
    plan = decode_plan((tmp_path / "plan" / "plan.json").read_bytes())
    assert plan.layout == WIDE
    assert plan.predictions["step_time_s"] == choice.step_time_s
    assert "paceline" not in (tmp_path / "plan" / "commands.sh").read_text()
    write_exports(tmp_path / "plan", choice, _asked(), "h100-sxm", is_runnable=True)
    assert "train run.toml --plan plan.json" in (tmp_path / "plan" / "commands.sh").read_text()


def test_a_longer_sequence_than_the_preset_allows_is_in_the_plan(tmp_path: pathlib.Path) -> None:
    asked = dataclasses.replace(_asked(), context_length=131_072)
    write_exports(tmp_path, _choice(WIDE), asked, "h100-sxm", is_runnable=False)
    plan = decode_plan((tmp_path / "plan.json").read_bytes())
    assert plan.model.max_context_length == 131_072


def test_files_say_whose_constants_chose_the_layout(tmp_path: pathlib.Path) -> None:
    for framework, others in (("torchtitan", "megatron.args"), ("nemo", "torchtitan.toml")):
        directory = tmp_path / framework
        write_exports(
            directory, _choice(WIDE), _asked(), "h100-sxm", is_runnable=False, framework=framework
        )
        names = {"megatron.args", "torchtitan.toml"}
        said = {
            name
            for name in names
            if f"constants of framework {framework}" in (directory / name).read_text()
        }
        assert said == {others}
