"""Tests of searches for mixtures of experts: exact as for dense models, with one more axis."""

import dataclasses
import json
import pathlib
import tomllib

import msgspec
import numpy as np
import pytest

from paceline.accounting.counts import flops_per_token
from paceline.cli.main import main
from paceline.core import ParallelLayout, UsageError, model_preset
from paceline.core.errors import ShapeError
from paceline.core.presets import find_preset
from paceline.planner.calibrations.calibration import FrameworkCalibration, known_calibrations
from paceline.planner.search.advice import compare
from paceline.planner.search.budget import estimate_run
from paceline.planner.search.candidates import Mesh, candidate_chunks, candidates_of, expert_sizes
from paceline.planner.search.exports import (
    megatron_flags,
    megatron_notes,
    torchtitan_config,
    torchtitan_refusal,
    write_exports,
)
from paceline.planner.search.search import Candidate, NoLayoutError, search
from paceline.planner.search.spec import SearchSpec, assumed_performance, parse_fixed
from paceline.records import decode_plan
from paceline.training.plan import read_plan
from tests.unit.planner.search.search_cases import (
    H100,
    MIXTURE,
    PERFORMANCE,
    oracle,
    spec,
    with_memory,
)

ASKED = spec(experts=MIXTURE, num_devices=4, global_batch=2)


def _preset(name: str, devices: int = 16, **changes: object) -> SearchSpec:
    shape, experts = find_preset(name)
    values: dict[str, object] = {
        "shape": shape,
        "experts": experts,
        "context_length": 4096,
        "global_batch": 512,
        "num_devices": devices,
        "memory_bytes": 80e9,
        "devices_per_host": 8,
    }
    return spec(**values | changes)


@pytest.fixture(scope="module")
def tried() -> list[tuple[float, float, object]]:
    return list(oracle(ASKED))


@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_the_best_is_that_of_trying_every_layout(
    share: float, tried: list[tuple[float, float, object]]
) -> None:
    memories = sorted(memory for _, memory, _ in tried)
    capacity = memories[int(share * (len(memories) - 1))]
    fitting = [seconds for seconds, memory, _ in tried if memory <= capacity]
    result = search(with_memory(ASKED, capacity), PERFORMANCE, top=100)
    assert result.best.step_time_s.value == pytest.approx(min(fitting), rel=1e-8)
    assert result.num_candidates == len(tried)
    assert result.num_fitting == len(fitting)


def test_every_mesh_shows_its_own_best(tried: list[tuple[float, float, object]]) -> None:
    axes = ("tensor", "context", "pipeline", "expert")
    best: dict[tuple[int, ...], float] = {}
    for seconds, _, layout in tried:
        mesh = tuple(getattr(layout, axis) for axis in axes)
        best[mesh] = min(best.get(mesh, seconds), seconds)
    shown = {
        tuple(getattr(each.layout, axis) for axis in axes): each.step_time_s.value
        for each in search(ASKED, PERFORMANCE, top=1000).choices
    }
    assert shown.keys() == best.keys()
    assert {mesh[3] for mesh in best} == {1, 2, 4}
    assert all(shown[mesh] == pytest.approx(best[mesh], rel=1e-8) for mesh in best)


def test_columns_make_the_same_candidates_again() -> None:
    chunk = next(candidate_chunks(ASKED))
    again = candidates_of(chunk.columns, ASKED)
    assert (again.columns == chunk.columns).all()
    assert len(np.unique(chunk.columns, axis=1).T) == len(chunk)
    assert (chunk.take(np.array([0, 2])).layouts.expert == chunk.layouts.expert[[0, 2]]).all()


def test_dense_models_have_no_expert_ranks() -> None:
    chunk = next(candidate_chunks(spec()))
    assert set(chunk.layouts.expert) == {1}
    assert len(set(next(candidate_chunks(ASKED)).layouts.expert)) > 1


def test_expert_ranks_divide_experts_and_the_ranks_of_a_stage() -> None:
    mesh = Mesh(tensor=2, context=3, pipeline=5, data=4)
    assert expert_sizes(ASKED, mesh, (4, 1, 0)) == (1, 2, 3, 4, 6, 12)
    # With replicas of shards, each replica holds all experts.
    assert expert_sizes(ASKED, mesh, (4, 1, 1)) == (1, 2, 3, 6)
    assert expert_sizes(ASKED, mesh, (1, 4, 1)) == (1, 2, 3, 4, 6, 12)


def test_terms_have_what_experts_send() -> None:
    one, all_of_them = (
        search(dataclasses.replace(ASKED, fixed={"expert": ranks}), PERFORMANCE).best
        for ranks in (1, 4)
    )
    assert one.terms_s["expert_s"] == 0
    assert all_of_them.terms_s["expert_s"] > 0
    assert "ep 4" in all_of_them.name
    assert "ep" not in one.name
    assert sum(all_of_them.terms_s.values()) == pytest.approx(all_of_them.step_time_s.value)
    assert "expert communication" in all_of_them.parts


def test_mfu_counts_active_weights() -> None:
    asked, peak = _preset("deepseek-v3", 512), H100.peak("bfloat16").value
    best = search(asked, PERFORMANCE, top=1, peak_flops=peak).best
    flops = flops_per_token(asked.shape, 4096).model * asked.tokens_per_step
    assert best.mfu == pytest.approx(flops / (best.step_time_s.value * best.devices * peak))
    all_saved, active_saved = (
        estimate_run(best, asked.shape, tokens=1e12, held_devices=512, experts=experts)
        for experts in (asked.experts, None)
    )
    assert all_saved.days > active_saved.days


def test_another_number_of_expert_ranks_is_explained() -> None:
    asked = _preset("qwen3-30B-A3B")
    best = search(asked, PERFORMANCE).best
    other = compare("ep=4,tp=2", best, asked, PERFORMANCE, None)
    assert (other.other.layout.expert, other.other.layout.tensor) == (4, 2)
    assert other.other.layout.sequence_parallel
    assert parse_fixed("ep=8") == {"expert": 8}
    with pytest.raises(NoLayoutError, match=r"with ep=3 divides .* 32 heads, 128 experts"):
        compare("ep=3", best, asked, PERFORMANCE, None)


def test_expert_ranks_are_ranks_of_a_stage() -> None:
    assert ParallelLayout(replicate=2, tensor=2, expert=4).world_size == 4
    with pytest.raises(ShapeError, match="expert is 4; it must divide"):
        ParallelLayout(replicate=2, pipeline=2, expert=4)


def test_what_has_no_experts_is_refused() -> None:
    with pytest.raises(UsageError, match="ep=8: the model has no experts to divide"):
        spec(fixed={"expert": 8})
    assert spec(fixed={"expert": 1}).experts is None
    with pytest.raises(UsageError, match="not support mixtures of experts, so no layout"):
        spec(experts=MIXTURE, runnable=True)
    with pytest.raises(UsageError, match="mixtral-8x7B is a mixture of experts, which only"):
        model_preset("mixtral-8x7B")
    with pytest.raises(UsageError, match="did you mean 'mixtral-8x7B'"):
        find_preset("mixtral")


def test_costs_that_are_assumed_are_those_of_small_matmuls() -> None:
    dense, mixture = (
        assumed_performance(H100, "bfloat16", of_experts=of_experts) for of_experts in (False, True)
    )
    assert mixture.cluster.flops_per_s < dense.cluster.flops_per_s
    assert "no calibration of experts for h100-sxm" in mixture.note


def test_calibrations_of_experts_are_told_by_their_name() -> None:
    dense = next(each for each in known_calibrations() if not each.of_experts)
    name = f"{dense.framework}-experts-{dense.device}-{dense.precision}"
    assert msgspec.structs.replace(dense, name=name).of_experts
    assert isinstance(dense, FrameworkCalibration)


def _best(asked: SearchSpec) -> Candidate:
    return search(asked, PERFORMANCE, top=1).best


def test_megatron_flags() -> None:
    asked = _preset("deepseek-v3", 512, fixed={"expert": 64, "tensor": 2})
    flags = megatron_flags(_best(asked), asked)
    assert set(flags) >= {
        "--num-experts 256",
        "--moe-router-topk 8",
        "--moe-ffn-hidden-size 2048",
        "--moe-shared-expert-intermediate-size 2048",
        "--moe-layer-freq ([0]*3+[1]*58)",
        "--ffn-hidden-size 18432",
        "--expert-model-parallel-size 64",
        "--expert-tensor-parallel-size 1",
        "--sequence-parallel",
    }
    # The shape's head width is a mean, which Megatron cannot use.
    assert not any(flag.startswith(("--kv-channels", "--num-query-groups")) for flag in flags)
    assert "--multi-latent-attention" in " ".join(megatron_notes(_best(asked), asked))
    dense = spec()
    plain = " ".join(megatron_flags(_best(dense), dense))
    assert "expert" not in plain
    assert "moe" not in plain


def test_torchtitan_takes_whole_groups_of_tensor_ranks() -> None:
    asked = _preset("qwen3-30B-A3B", fixed={"expert": 8, "tensor": 2, "stage": 3, "shard": 8})
    config = tomllib.loads(torchtitan_config(_best(asked), asked))
    assert (config["model"]["name"], config["model"]["flavor"]) == ("qwen3", "30B-A3B")
    assert config["parallelism"]["expert_parallel_degree"] == 8
    assert config["parallelism"]["expert_tensor_parallel_degree"] == 1
    assert torchtitan_refusal(_best(asked), asked) is None
    odd = dataclasses.replace(asked, fixed={"expert": 2, "tensor": 4, "stage": 3})
    refused = torchtitan_refusal(_best(odd), odd)
    assert refused is not None
    assert "it wants a multiple of 4" in refused


def test_what_torchtitan_does_not_know_is_left_out(tmp_path: pathlib.Path) -> None:
    asked = _preset("mixtral-8x7B", 32)
    paths = write_exports(tmp_path, _best(asked), asked, "h100-sxm", is_runnable=False)
    assert {path.name for path in paths} == {"plan.json", "megatron.args", "commands.sh"}
    assert "no model of this mixture" in (tmp_path / "commands.sh").read_text()
    plan = decode_plan((tmp_path / "plan.json").read_bytes())
    assert plan.experts == asked.experts
    with pytest.raises(UsageError, match="a mixture of experts, which paceline train does not"):
        read_plan(tmp_path / "plan.json")


def test_the_command_searches_mixtures(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "search", "--model", "QWEN3-30b-a3b", "--devices", "16"]
    asked += ["--precision", "float8"]
    assert main([*asked, "--compare", "ep=16,tp=1", "--no-advice"]) == 0
    shown = capsys.readouterr().out
    assert "Why not ep=16,tp=1?" in shown
    assert "expert communication" in shown
    assert main([*asked, "--json", "--top", "2", "--no-advice", "--tokens", "1e12"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1]["choice"]["layout"]["expert"] > 1
    assert main([*asked, "--calibration", "nemo"]) == 2
    assert "mixture of experts with --framework" in capsys.readouterr().err
    assert main([*asked, "--runnable"]) == 2
    assert "does not support mixtures of experts" in capsys.readouterr().err
    assert main(["plan", "memory", "--model", "qwen3-30B-A3B", "--strategy", "none"]) == 0
    # Without sharding, 4 bytes for each of 30,532,122,624 parameters.
    assert "parameters       113.74 GiB" in capsys.readouterr().out
    assert main(["plan", "step", "--calibration", "none.jsonl", "--model", "qwen3-30B-A3B"]) == 2
