"""Tests that the search matches brute force over all layouts and returns only layouts that fit."""

import dataclasses

import pytest

from paceline.core import UsageError, model_preset
from paceline.planner.search import search as search_module
from paceline.planner.search.advice import (
    compare,
    not_told_apart,
    pareto_front,
    sensitivity,
    variations,
)
from paceline.planner.search.budget import estimate_run
from paceline.planner.search.candidates import candidate_chunks
from paceline.planner.search.search import NoLayoutError, search
from paceline.planner.search.spec import parse_fixed, training_precision
from tests.unit.planner.search.search_cases import H100, PERFORMANCE, oracle, spec, with_memory


@pytest.fixture(scope="module")
def tried() -> list[tuple[float, float, object]]:
    return list(oracle(spec(num_devices=4, global_batch=4)))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
def test_the_best_is_that_of_trying_every_layout(
    share: float, tried: list[tuple[float, float, object]]
) -> None:
    memories = sorted(memory for _, memory, _ in tried)
    capacity = memories[int(share * (len(memories) - 1))]
    fitting = [seconds for seconds, memory, _ in tried if memory <= capacity]
    asked = with_memory(spec(num_devices=4, global_batch=4), capacity)
    result = search(asked, PERFORMANCE, top=50)
    assert result.best.step_time_s.value == pytest.approx(min(fitting), rel=1e-8)
    assert result.num_candidates == len(tried)
    assert result.num_fitting == len(fitting)
    assert all(choice.peak_bytes <= capacity for choice in result.choices)
    times = [choice.step_time_s.value for choice in result.choices]
    assert times == sorted(times)


def test_every_mesh_shows_its_own_best(tried: list[tuple[float, float, object]]) -> None:
    result = search(spec(num_devices=4, global_batch=4), PERFORMANCE, top=100)
    best: dict[tuple[int, ...], float] = {}
    for seconds, _, layout in tried:
        mesh = tuple(getattr(layout, axis) for axis in ("tensor", "context", "pipeline"))
        best[mesh] = min(best.get(mesh, seconds), seconds)
    shown = {
        (each.layout.tensor, each.layout.context, each.layout.pipeline): each.step_time_s.value
        for each in result.choices
    }
    assert shown.keys() == best.keys()
    assert all(shown[mesh] == pytest.approx(best[mesh], rel=1e-8) for mesh in best)


def test_our_own_trainer_is_searched_on_every_mesh() -> None:
    result = search(spec(runnable=True), PERFORMANCE, top=100)
    layouts = [each.layout for each in result.choices]
    meshes = {(each.tensor, each.context, each.pipeline) for each in layouts}
    assert {(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)} <= meshes
    assert {each.activation_checkpointing for each in layouts} <= {"none", "full"}


def test_chunks_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = spec()
    whole = search(asked, PERFORMANCE, top=4)
    monkeypatch.setattr(
        search_module, "candidate_chunks", lambda asked: candidate_chunks(asked, chunk=64)
    )
    assert search(asked, PERFORMANCE, top=4).choices == whole.choices


def test_terms_and_memory_add_up() -> None:
    best = search(spec(), PERFORMANCE, peak_flops=H100.peak("bfloat16").value).best
    assert sum(best.terms_s.values()) == pytest.approx(best.step_time_s.value)
    assert sum(best.parts.values()) == pytest.approx(best.step_time_s.value)
    assert best.bound == next(iter(best.parts))
    assert best.mfu is not None
    assert 0 < best.mfu < 1
    assert 0 <= best.bubble_share + best.exposed_share < 1


def test_what_does_not_fit_is_told_with_what_is_missing() -> None:
    with pytest.raises(NoLayoutError, match=r"none of .* fits: the smallest .* needs .* would"):
        search(spec(memory_bytes=1000.0), PERFORMANCE)


def test_what_does_not_divide_is_told() -> None:
    with pytest.raises(NoLayoutError, match="6 devices would divide them; use that many, or"):
        search(spec(num_devices=7, devices_per_host=1), PERFORMANCE)
    with pytest.raises(NoLayoutError, match=r"with tp=3,recompute=full divides .*; give a batch"):
        search(spec(fixed={"tensor": 3, "checkpointing": 2}), PERFORMANCE)


def test_devices_that_divide_nothing_stand_by() -> None:
    result = search(spec(num_devices=9, devices_per_host=1, least_used=0.8), PERFORMANCE)
    assert result.best.devices == 8


def test_another_layout_is_explained() -> None:
    asked = spec()
    best = search(asked, PERFORMANCE).best
    other = compare("tp=4,pp=2", best, asked, PERFORMANCE, None)
    assert (other.other.layout.tensor, other.other.layout.pipeline) == (4, 2)
    assert other.fits
    assert "longer" in other.reason
    tight = with_memory(asked, best.peak_bytes)
    alone = compare("tp=1,pp=1,cp=1,zero=0", best, tight, PERFORMANCE, None)
    assert not alone.fits
    assert "more memory than a device has" in alone.reason


def test_fields_are_read_by_their_short_names() -> None:
    assert parse_fixed("tp=8, recompute=full") == {"tensor": 8, "checkpointing": 2}
    for text in ("tensr=2", "tp=x", "recompute=some", ""):
        with pytest.raises(UsageError):
            parse_fixed(text)


def test_intervals_decide_what_cannot_be_told_apart() -> None:
    result = search(spec(), PERFORMANCE, top=20)
    assert 1 < not_told_apart(result.choices) <= len(result.choices)
    exact = dataclasses.replace(PERFORMANCE, interval=lambda layouts, workload: (1.0, 1.0))
    assert not_told_apart(search(spec(), exact, top=20).choices) < len(result.choices)


def test_changes_that_help_come_first() -> None:
    asked = spec()
    best = search(asked, PERFORMANCE).best
    changes = sensitivity(best, asked, variations(best, asked, PERFORMANCE))
    gains = [change.speedup for change in changes]
    assert gains == sorted(gains, reverse=True)
    by_name = {change.what: change for change in changes}
    assert by_name["a network twice as fast"].speedup >= 1
    assert by_name["twice the memory per device"].speedup >= 1


def test_the_front_has_the_fastest_and_the_cheapest() -> None:
    points = pareto_front(spec(), PERFORMANCE)
    fastest = min(points, key=lambda point: point.seconds_per_token)
    cheapest = min(
        points, key=lambda point: (point.device_seconds_per_token, point.seconds_per_token)
    )
    assert fastest.on_front
    assert cheapest.on_front


def test_failures_make_a_run_longer_on_more_devices() -> None:
    asked = spec(
        shape=model_preset("llama3-8B"), context_length=8192, global_batch=512, memory_bytes=80e9
    )
    runs = {}
    for count in (64, 4096):
        wide = dataclasses.replace(asked, num_devices=count, devices_per_host=8)
        best = search(wide, PERFORMANCE, top=1).best
        runs[count] = estimate_run(best, wide.shape, tokens=1e12, held_devices=count, price=2.0)
    assert runs[4096].goodput < runs[64].goodput < 1
    for run in runs.values():
        assert run.days == pytest.approx(run.days_without_failures / run.goodput)
        assert run.cost == pytest.approx(2 * run.device_hours)
        assert run.device_hours >= run.days * 24 * 64


def test_precisions_have_the_bytes_of_mixed_training() -> None:
    half = training_precision("float8")
    assert (half.parameters, half.gradients, half.master_weights) == ("bfloat16", "float32", True)
    assert training_precision("bfloat16", autocast=True).parameters == "float32"
    assert training_precision("float32").compute == "float32"
