"""The explanation of a layout: every line's numbers give the term of the search."""

import json
import re

import pytest

from paceline.accounting.named_model import find_model
from paceline.cli.main import main
from paceline.planner.search.advice import compare
from paceline.planner.search.cluster_options import ClusterOptions
from paceline.planner.search.explanation import explain_choice, term_lines
from paceline.planner.search.search import search


class Options(ClusterOptions):
    """Options with the device that the command line names."""

    device: str = "h100-sxm"


@pytest.mark.parametrize("framework", ["other", "nemo", "torchtitan"])
@pytest.mark.parametrize(
    ("model", "devices"), [("llama3-8B", 8), ("llama3-70B", 512), ("qwen3-30B-A3B", 64)]
)
def test_every_formula_gives_the_term_of_the_search(
    model: str, devices: int, framework: str
) -> None:
    named, options = find_model(model), Options(framework=framework)
    spec = options.spec(named.shape, devices, experts=named.experts, runnable=False)
    performance = options.performance(of_experts=named.experts is not None)
    for choice in search(spec, performance, top=6).choices:
        lines = list(term_lines(choice, spec, performance))
        assert {line.term: pytest.approx(line.seconds, rel=1e-9, abs=1e-12) for line in lines} == (
            choice.terms_s
        )
        explained = explain_choice(choice, spec, performance)
        assert sum(
            seconds for term, seconds in explained.values.items() if term in choice.terms_s
        ) == pytest.approx(choice.step_time_s.value)
        assert explained.values["peak_bytes"] == pytest.approx(choice.peak_bytes)


def test_the_command_prints_formulas_with_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "search", "--model", "llama3-8B", "--devices", "64", "--no-advice"]
    assert main([*asked, "--explain"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"compute = m \(L / p \(matmul FLOPs / rate", output)
    assert re.search(r"with +\d+ x \(32 x \([\d.]+ TFLOP / ", output)
    assert re.search(r"gives [\d.]+ s, [\d.]+% of the step", output)
    assert "peak memory = states + activations" in output
    assert main([*asked, "--explain", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    explained = next(row for row in rows if row["kind"] == "explanation")["explanation"]
    assert explained["values"]["compute_s"] > 0


@pytest.mark.parametrize("framework", ["torchtitan", "nemo", "megatron-bridge"])
def test_shares_add_up_to_the_step_also_if_the_framework_beats_the_formulas(framework: str) -> None:
    named, options = find_model("llama3-8B"), Options(framework=framework, batch_tokens="1M")
    spec = options.spec(named.shape, 8)
    performance = options.performance()
    # Almost all of the time is compute, of which a faster framework left more than 100%.
    best = search(spec, performance, top=1).best
    explained = explain_choice(best, spec, performance)
    shares, below = [], []
    for step in explained.steps:
        if found := re.search(r", ([-\d.]+)% of the step$", step.result):
            shares.append(float(found[1]))
        elif step.result.startswith("-"):
            below.append(step)
    assert all(0 <= share <= 100 for share in shares)
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert len(below) == (best.terms_s["framework_s"] < 0) == (framework != "nemo")
    assert best.share("compute") + best.exposed_share <= 1
    for step in below:
        assert re.fullmatch(
            r"-[\d.]+ m?s: the framework is faster than the formulas, in all terms alike; shares "
            r"are of the [\d.]+ s before this",
            step.result,
        )
        (whole,) = [step for step in explained.steps if step.formula.startswith("step =")]
        assert " + -" not in whole.numbers
        assert whole.numbers.count(" - ") == 1


@pytest.mark.parametrize(
    ("framework", "batch", "zero", "passes", "whole"),
    [
        ("other", "128K", 3, 2, True),
        ("other", "128K", 2, 2, True),
        ("other", "64K", 3, 1, False),
        ("other", "128K", 1, 2, False),
        ("llm-foundry", "128K", 3, 2, False),
    ],
)
def test_gradients_that_accumulate_whole_are_said_to_be(
    framework: str, batch: str, zero: int, passes: int, whole: bool
) -> None:
    named = find_model("llama3-8B")
    options = Options(framework=framework, batch_tokens=batch, memory="400GiB")
    spec, performance = options.spec(named.shape, 8), options.performance()
    asked = f"dp=8,tp=1,pp=1,cp=1,zero={zero},micro=1"
    choice = compare(asked, search(spec, performance).best, spec, performance, None).other
    assert choice.batch.accumulation_steps == passes
    explained = explain_choice(choice, spec, performance)
    lines = [step for step in explained.steps if step.formula.startswith("gradients =")]
    assert len(lines) == whole
    for line in lines:
        assert line.formula == (
            f"gradients = all of the rank's parameters x bytes: they are averaged once for 2 "
            f"passes, until when ZeRO-{zero} does not shard them"
        )
        assert line.numbers == "8,030,261,248 x 4 B"
        assert line.result == "29.92 GiB"


def test_pipelines_are_explained_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "search", "--model", "llama3-70B", "--devices", "64", "--no-advice"]
    assert main([*asked, "--explain", "--json", "--top", "1"]) == 0
    *_, explained = map(json.loads, capsys.readouterr().out.splitlines())
    assert explained["explanation"]["values"]["bubble_s"] > 0
