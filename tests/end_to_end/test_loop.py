"""Tests of ``paceline loop`` as typed by a user: dry runs and mistakes.

`studies/loop/loops.py` runs whole loops, `studies/loop/kills.py` kills one.
"""

import json
import pathlib

import pytest

from tests.end_to_end.zipf_text import prepare_text
from tests.processes import call_paceline, paceline

_LOOP = ("loop", "--budget", "8e13", "--exploration", "1", "--epochs", "64", "--json")
_CLUSTER = ("loop", "--budget", "1e25", "--devices", "16384", "--exploration", "0.02", "--dry-run")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a directory with tokens and a config."""
    place = tmp_path_factory.mktemp("loop")
    prepare_text(place, "run.toml")
    return place


def test_a_cluster_is_planned_on_paper(tmp_path: pathlib.Path) -> None:
    found = paceline(tmp_path, *_CLUSTER, "--price", "2", "--json")
    assert found.returncode == 0, found.stderr
    plan = json.loads(found.stdout)
    assert plan["run"]["goodput"] > 0.5
    assert plan["run"]["cost"] == pytest.approx(2 * plan["run"]["device_hours"])
    assert plan["parameters"]["low"] < plan["parameters"]["value"] < plan["parameters"]["high"]
    assert plan["layout"]["step_time_s"]["low"] < plan["layout"]["step_time_s"]["high"]
    shown = call_paceline(tmp_path, *_CLUSTER, "--deadline", "24h").stdout
    # The last is a single word: a column may break the phrase "after the deadline".
    for words in ("where it comes from", "goodput", "a checkpoint every", "deadline"):
        assert words in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "1e25", "--devices", "8"), "--dry-run"),
        (("--budget", "-1"), "it must be positive"),
        (("--budget", "1e12", "--at-once", "0"), "--at-once must be at least 1"),
    ],
)
def test_mistakes_are_named(tmp_path: pathlib.Path, arguments: tuple[str, ...], words: str) -> None:
    refused = call_paceline(tmp_path, "loop", *arguments)
    assert refused.returncode == 2
    assert words in refused.stderr


def test_a_loop_is_planned_before_it_is_run(place: pathlib.Path) -> None:
    planned = call_paceline(place, *_LOOP, "--dry-run")
    runs = [json.loads(line) for line in planned.stdout.splitlines()]
    assert runs[-1]["purpose"] == "final"
    assert runs[-1]["flops"] == pytest.approx(8e13, rel=0.05)
    assert not (place / "loop").exists()


def test_the_models_have_the_keys_of_the_config(place: pathlib.Path) -> None:
    keys = ("model.rope_theta=5e5", "model.norm_epsilon=1e-6", "model.tied_embeddings=true")
    changes = [word for key in keys for word in ("--set", key)]
    planned = call_paceline(place, *_LOOP, *changes, "--dry-run")
    shapes = [json.loads(line)["shape"] for line in planned.stdout.splitlines()]
    found = {(s["rope_theta"], s["norm_epsilon"], s["tied_embeddings"]) for s in shapes}
    assert found == {(5e5, 1e-6, True)}


def test_a_budget_for_too_few_sizes_is_refused(place: pathlib.Path) -> None:
    refused = call_paceline(place, "loop", "--budget", "2e13", "--exploration", "1")
    assert refused.returncode == 2
    assert "of 15 small runs" in refused.stderr
    assert "times as many FLOPs" in refused.stderr
