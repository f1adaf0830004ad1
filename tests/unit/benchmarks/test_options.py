import pytest

from paceline.benchmarks.options import RunLimits, ShapeOverrides, parse_layout
from paceline.core import UsageError


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("", "micro=1"),
        ("pipeline=2", "pipeline=2,micro=1"),
        ("micro=4,pipeline=2,interleave=2", "pipeline=2,interleave=2,micro=4"),
        ("shard=2", "shard=2,zero=3,micro=1"),
        ("shard=4,zero=2,replicate=2", "replicate=2,shard=4,zero=2,micro=1"),
        ("tensor=2,sp=1,context=2", "context=2,tensor=2,sp=1,micro=1"),
    ],
)
def test_a_layout_is_written_in_one_way(text: str, written: str) -> None:
    assert parse_layout(text).text == written
    assert parse_layout(written) == parse_layout(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipline=2", "'pipline=2' is not one of replicate"),
        ("pipeline", "'pipeline' is not one of replicate"),
        ("tensor=-2", "'tensor=-2' is not one of"),
        ("tensor=0", "ParallelLayout.tensor is 0"),
        ("shard=2,zero=0", "set sharding to what is sharded"),
        ("shard=2,zero=4", "zero=4 is not a ZeRO stage"),
        ("pipeline=2,micro=0", "micro=0 has no sequences; use 1 or more"),
        ("tensor=2,micro=1,tensor=4", "tensor is given twice; leave one of them out"),
    ],
)
def test_a_mistake_in_a_layout_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_layout(text)


def test_overrides_make_a_shape_without_a_name() -> None:
    name, shape = ShapeOverrides(num_layers=2, d_ff=100).apply("small")
    assert (name, shape.num_layers, shape.d_ff, shape.d_model) == ("custom", 2, 100, 768)
    assert ShapeOverrides().apply("small")[0] == "small"


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ({"memory_limit_gib": 0}, "--memory-limit-gib"),
        ({"memory_limit_gib": float("inf")}, "--memory-limit-gib"),
        ({"time_limit_s": 0}, "--time-limit-s"),
    ],
)
def test_a_limit_that_makes_no_sense_names_its_flag(limits: dict, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        RunLimits(**limits)
