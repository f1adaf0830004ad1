import math
import pathlib
import platform
import socket
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import RecordError
from paceline.records import Metric, Record, capture_environment, find_kind, join_key, known_kinds
from paceline.records.kinds import COMPRESSION, PREDICTION, PREDICTS


@given(st.lists(st.floats(min_value=1e-9, max_value=1e9), min_size=1, max_size=20))
def test_a_metric_summarises_its_samples(samples: list[float]) -> None:
    metric = Metric.from_samples(samples)
    assert metric.value == statistics.median(samples)
    assert metric.min == min(samples)
    assert metric.samples == tuple(samples)
    assert metric.mean == pytest.approx(sum(samples) / len(samples))


def test_metrics_are_finite_and_have_samples() -> None:
    for bad in (math.nan, math.inf):
        for make in (
            lambda bad=bad: Metric(value=bad),
            lambda bad=bad: Metric(value=1.0, samples=(1.0, bad)),
            lambda bad=bad: Metric.from_samples([1.0, 1.0, 1.0, bad]),
        ):
            with pytest.raises(RecordError, match="finite"):
                make()
    with pytest.raises(RecordError, match="at least one sample"):
        Metric.from_samples([])


def test_a_prediction_joins_its_measurement() -> None:
    for name in known_kinds():
        case = dict.fromkeys(find_kind(name).join_key, "x")
        measured = Record(
            kind=name,
            case=case | {field: 1 for field in find_kind(name).method if field != COMPRESSION},
            environment=capture_environment(),
            metrics={},
            outcome="ok",
        )
        predicted = Record(
            kind=PREDICTION,
            case=case | {PREDICTS: name},
            environment=capture_environment(),
            metrics={"step_time_s": Metric(value=1.0, low=0.9, high=1.1)},
            outcome="ok",
        )
        assert join_key(measured) == join_key(predicted)


def test_records_join_on_what_links_were_shaped_to_not_on_what_was_measured_on_them() -> None:
    def key(**links: float) -> object:
        case = dict.fromkeys(find_kind("step").join_key, "x")
        return join_key(
            Record(
                kind="step",
                case={**case, **links},
                environment=capture_environment(),
                metrics={},
                outcome="ok",
            )
        )

    shaped = key(link_rate_bits_per_s=1e9)
    assert key(link_rate_bits_per_s=1e9, measured_link_rate_bits_per_s=9.5e8) == shaped
    sites = key(link_rate_bits_per_s=1e9, num_sites=2, measured_site_rate_bits_per_s=9.5e7)
    assert key(link_rate_bits_per_s=1e9, num_sites=2) == sites != shaped
    for other in (
        *({"link_rate_bits_per_s": 2e9}, {"link_loss": 0.01}, {"link_delay_s": 0.01}),
        *({"site_rate_bits_per_s": 1e8}, {"site_loss": 0.01}, {"site_delay_s": 0.01}),
    ):
        assert key(**{"link_rate_bits_per_s": 1e9, **other}) != shaped


def test_a_prediction_must_say_of_what() -> None:
    with pytest.raises(RecordError, match="unknown record kind 'None'"):
        Record(
            kind=PREDICTION, case={}, environment=capture_environment(), metrics={}, outcome="ok"
        )


def test_the_environment_says_where_but_not_who(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = capture_environment(devices=["NVIDIA H100"], backends=["gloo"])
    assert environment.devices == ("NVIDIA H100",)
    assert environment.packages["torch"]
    assert environment.num_processors >= 1
    assert environment.time.endswith("+00:00")
    real = platform.uname()
    monkeypatch.setattr(platform, "uname", lambda: real._replace(node="host-of-mine"))
    for module, name in ((platform, "node"), (socket, "gethostname"), (socket, "getfqdn")):
        monkeypatch.setattr(module, name, lambda: "host-of-mine")
    monkeypatch.setenv("HOSTNAME", "host-of-mine")
    monkeypatch.setenv("USER", "host-of-mine")
    told = msgspec.json.encode(capture_environment()).decode()
    assert "host-of-mine" not in told
    assert str(pathlib.Path(__file__).parents[3]) not in told
    assert str(pathlib.Path.home()) + "/" not in told
