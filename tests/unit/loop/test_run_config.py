"""Tests that runs keep every key of the user's config, except those that the design decides."""

import dataclasses
import functools
import json
import pathlib
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from paceline.accounting.counts import count_parameters, flops_per_token
from paceline.core.errors import UsageError
from paceline.core.presets import model_preset
from paceline.core.specs import ModelShape
from paceline.data.loader.config import SourceConfig
from paceline.loop.choose import final_config, pilot_config
from paceline.loop.on_paper import expected_final
from paceline.loop.run_config import DECIDED, ladder_of, run_config
from paceline.loop.sweep_design import PlannedRun, Rule, SweepSpec, batch_runs, first_runs
from paceline.loop.sweep_directory import SweepDirectory
from paceline.training.config import OuterConfig, RunConfig
from paceline.training.forecast import forecast
from paceline.training.toml_config import decode_config
from tests.unit.loop.fake_machine import SPEC as LOOP_SPEC
from tests.unit.loop.fake_machine import make_runner
from tests.unit.loop.fake_runs import BASE, SPEC, FakeExecutor, make_sweep_runner

_VALUES: dict[str, Any] = {
    "parallel.outer": OuterConfig(every_steps=7),
    "out": "elsewhere",
    "model.preset": "bytes-34M",
    "model.vocab_size": 300,
    "model.d_model": 320,
    "model.d_ff": 640,
    "model.num_layers": 7,
    "model.num_heads": 16,
    "model.num_kv_heads": 2,
    "model.head_dim": 30,
    "model.max_context_length": 999,
    "model.tied_embeddings": True,
    "model.rope_theta": 5e5,
    "model.norm_epsilon": 1e-6,
    "data.sources": (SourceConfig(place="tokens", weight=2.0),),
    "data.window": 7,
    "data.cache_directory": "cache",
    "evaluation.sample_prompt": "Once",
    "logging.sinks": ("tensorboard",),
    "watch.step_timeout_s": 7.0,
    "checkpoint.memory_directory": "memory",
}
"""Values of the keys for which `_other` has none: its type or its default does not suggest one."""
_SECTIONS = ("model", "training", "optimizer", "schedule")
_REFUSED = "model.hugging_face"


def _keys() -> Iterator[tuple[str, str, dataclasses.Field[Any], type]]:
    """Yields the section, name, field and owner of every key of a config."""
    hints = typing.get_type_hints(RunConfig)
    for field in dataclasses.fields(RunConfig):
        section = hints[field.name]
        if not dataclasses.is_dataclass(section):
            yield "", field.name, field, RunConfig
            continue
        for inner in dataclasses.fields(section):
            yield field.name, inner.name, inner, typing.cast(type, section)


_NAMES = [f"{section}.{name}".lstrip(".") for section, name, _, _ in _keys()]


def _other(key: str, field: dataclasses.Field[Any], owner: type) -> Any:
    """Returns a valid value that is not the default."""
    if key in _VALUES:
        return _VALUES[key]
    hint = typing.get_type_hints(owner)[field.name]
    if typing.get_origin(hint) is typing.Literal:
        return next(choice for choice in typing.get_args(hint) if choice != field.default)
    if isinstance(hint, types.UnionType) or not isinstance(field.default, bool | int | float):
        pytest.fail(f"give {key} a value in _VALUES that is not its default")
    if isinstance(field.default, bool):
        return not field.default
    return field.default + 1 if isinstance(field.default, int) else field.default / 2 or 0.5


def _changed(key: str) -> RunConfig:
    """Returns a config with a single key that is not at its default."""
    for section, name, field, owner in _keys():
        if f"{section}.{name}".lstrip(".") == key:
            changes = {name: _other(key, field, owner)}
            if not section:
                return dataclasses.replace(BASE, **changes)
            inner = dataclasses.replace(getattr(BASE, section), **changes)
            return dataclasses.replace(BASE, **{section: inner})
    raise AssertionError(key)


def _all_changed() -> RunConfig:
    """Returns a config in which no key of the sections of the training is at its default."""
    changes: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for section, name, field, owner in _keys():
        key = f"{section}.{name}"
        if section in _SECTIONS and key != _REFUSED:
            changes[section][name] = _other(key, field, owner)
    sections = {
        section: dataclasses.replace(getattr(BASE, section), **values)
        for section, values in changes.items()
    }
    return dataclasses.replace(BASE, **sections)


def _value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def _spec(base: RunConfig) -> SweepSpec:
    return msgspec.structs.replace(
        SPEC,
        vocab_size=base.model.shape.vocab_size,
        context_length=base.data.context_length,
        ladder=ladder_of(base),
    )


def _configs(base: RunConfig) -> dict[str, tuple[PlannedRun, RunConfig]]:
    """Returns every kind of run that a sweep or a loop plans, with its config."""
    *small, final = _planned(_spec(base))
    place = pathlib.Path("run")
    found = {run.name: (run, run_config(base, run, place)) for run in small}
    found["on paper"] = final, run_config(base, final, place)
    found["pilot"] = final, pilot_config(base, final, place, "ddp")
    found["final"] = final, final_config(base, final, place, "ddp")
    return found


@functools.cache
def _planned(spec: SweepSpec) -> tuple[PlannedRun, ...]:
    """Returns the runs of a sweep, and the final run of a loop; cached, as most keys share them."""
    asked = msgspec.structs.replace(
        LOOP_SPEC,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        ladder=spec.ladder,
    )
    return (*first_runs(spec), *batch_runs(spec, Rule()), expected_final(asked))


def test_the_keys_of_rotary_positions_and_norms_reach_the_runs() -> None:
    model = dataclasses.replace(BASE.model, rope_theta=5e5, norm_epsilon=1e-6, tied_embeddings=True)
    for name, (_, config) in _configs(dataclasses.replace(BASE, model=model)).items():
        shape = config.model.shape
        found = shape.rope_theta, shape.norm_epsilon, shape.tied_embeddings
        assert found == (5e5, 1e-6, True), name


@pytest.mark.parametrize("key", [name for name in _NAMES if name != _REFUSED])
def test_a_key_reaches_every_run_or_the_design_says_why_not(key: str) -> None:
    base = _changed(key)
    wanted = _value(base, key)
    assert wanted != _value(BASE, key), f"the value of {key} in _VALUES is the default"
    kept = {name: _value(config, key) == wanted for name, (_, config) in _configs(base).items()}
    if key in DECIDED:
        assert not all(kept.values()), f"{key} is kept, so it needs no reason in DECIDED"
    else:
        lost = [name for name, is_kept in kept.items() if not is_kept]
        assert not lost, f"{key} is lost in {lost}: keep it, or say why in DECIDED"


def test_every_reason_is_about_a_key() -> None:
    assert set(DECIDED) <= set(_NAMES)


def test_a_model_of_hugging_face_is_refused() -> None:
    assert _REFUSED in DECIDED
    model = dataclasses.replace(BASE.model, hugging_face="somewhere")
    with pytest.raises(UsageError, match=r"model\.hugging_face"):
        ladder_of(dataclasses.replace(BASE, model=model))


def test_a_run_is_counted_as_the_model_that_it_trains() -> None:
    for base in (BASE, _all_changed()):
        for name, (run, config) in _configs(base).items():
            shape = config.model.shape
            assert _resolved(shape) == _resolved(run.shape), name
            assert run.parameters == count_parameters(shape).total
            per_token = flops_per_token(shape, config.data.context_length).model
            assert run.flops == per_token * run.tokens
            if name != "pilot":
                assert forecast(config, 1).flops == run.flops
            assert forecast(config, 1).num_parameters == run.parameters


def _resolved(shape: ModelShape) -> ModelShape:
    """Returns a shape with its derived dimensions written out."""
    return dataclasses.replace(shape, num_kv_heads=shape.key_value_heads, head_dim=shape.head_width)


def test_ratios_of_the_config_hold_for_every_width() -> None:
    model = dataclasses.replace(BASE.model, d_ff=640, num_heads=8, num_kv_heads=2)
    for run, _ in _configs(dataclasses.replace(BASE, model=model)).values():
        shape = run.shape
        assert shape.d_ff == pytest.approx(2.5 * shape.d_model, abs=32)
        assert shape.num_heads % shape.key_value_heads == 0
        assert shape.num_heads // shape.key_value_heads >= min(4, shape.num_heads)


def test_without_these_keys_the_models_are_those_of_the_ladder() -> None:
    plain, ours = first_runs(SPEC), first_runs(_spec(BASE))
    assert [run.shape for run in ours] == [run.shape for run in plain]
    assert [run.tokens for run in ours] == [run.tokens for run in plain]


def test_a_whole_loop_keeps_the_keys(tmp_path: pathlib.Path) -> None:
    base = _all_changed()
    spec = msgspec.structs.replace(
        LOOP_SPEC, vocab_size=base.model.shape.vocab_size, ladder=ladder_of(base)
    )
    runner = make_runner(tmp_path, FakeExecutor())
    runner.run(spec, base)
    paths = sorted(runner.directory.path.rglob("run.toml"))
    names = {path.parent.name for path in paths}
    assert {"rate-01", "batch-01", "fit-01", "pilot-1", "pilot-2", "run"} <= names
    refined = [run for run in runner.directory.sweep.state().runs if run.expected_loss is not None]
    assert {run.name for run in refined} <= names
    for path in paths:
        config = decode_config(path.read_text())
        for key in _NAMES:
            if key.partition(".")[0] in _SECTIONS and key not in DECIDED:
                assert _value(config, key) == _value(base, key), f"{key} of {path.parent.name}"


def _without_ladder(path: pathlib.Path) -> None:
    """Rewrites the JSON of a directory as versions without ladders wrote it."""
    raw = json.loads(path.read_text())
    raw.get("question", raw).pop("ladder")
    for run in raw.get("runs", []):
        assert not run.pop("is_whole_shape")
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("preset", ["bytes-6M", "llama3-8B"])
def test_a_sweep_of_an_earlier_version_goes_on_as_it_began(
    tmp_path: pathlib.Path, preset: str
) -> None:
    keys = {"rope_theta": 7e5, "tied_embeddings": True, "d_ff": 640}
    model = dataclasses.replace(BASE.model, preset=preset, vocab_size=256, **keys)
    base = dataclasses.replace(BASE, model=model)
    directory = SweepDirectory(tmp_path)
    executor = FakeExecutor(dies_after=12)
    with pytest.raises(KeyboardInterrupt):
        make_sweep_runner(tmp_path, executor).run(SPEC, base)
    _without_ladder(tmp_path / "sweep.json")
    before = directory.state().runs
    make_sweep_runner(tmp_path, FakeExecutor()).run(_spec(base), base)
    runs = directory.state().runs
    assert runs[: len(before)] == before
    assert any(run.expected_loss is not None for run in runs)
    for run in runs:
        shape = run_config(base, run, tmp_path).model.shape
        # Earlier versions trained untied models of the ladder, with the preset's rotary positions.
        assert not shape.tied_embeddings
        assert shape.d_ff == pytest.approx(8 / 3 * shape.d_model, abs=32)
        assert shape.rope_theta == model_preset(preset).rope_theta


def test_a_loop_of_an_earlier_version_goes_on_as_it_began(tmp_path: pathlib.Path) -> None:
    model = dataclasses.replace(BASE.model, tied_embeddings=True)
    base = dataclasses.replace(BASE, model=model)
    with pytest.raises(KeyboardInterrupt):
        make_runner(tmp_path, FakeExecutor(dies_after=12)).run(LOOP_SPEC, base)
    _without_ladder(tmp_path / "loop" / "loop.json")
    _without_ladder(tmp_path / "loop" / "sweep" / "sweep.json")
    runner = make_runner(tmp_path, FakeExecutor())
    runner.run(msgspec.structs.replace(LOOP_SPEC, ladder=ladder_of(base)), base)
    configs = [decode_config(path.read_text()) for path in runner.directory.path.rglob("run.toml")]
    assert {config.model.tied_embeddings for config in configs} == {False}


def test_another_model_needs_another_directory(tmp_path: pathlib.Path) -> None:
    SweepDirectory(tmp_path).begin(_spec(BASE), BASE)
    for change, words in (
        ({"tied_embeddings": True}, "tied_embeddings 0 there, 1 here"),
        ({"rope_theta": 5e5}, "rope_theta 10000 there, 500000 here"),
        ({"d_ff": 640}, "d_ff_ratio 2.66667 there, 2.5 here"),
    ):
        other = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, **change))
        with pytest.raises(UsageError, match=words):
            SweepDirectory(tmp_path).begin(_spec(other), other)
    # Width and depth are the sweep's to decide, so another preset's size is no other spec.
    wider = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, d_model=512))
    SweepDirectory(tmp_path).begin(_spec(wider), wider)
