"""Tests that course/README.md answers every problem of the hand-outs, with current figures."""

import functools
import pathlib
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from paceline.accounting import step_memory
from paceline.cli.main import parse
from paceline.core import BatchShape, model_preset, precision_preset
from paceline.core.units import GB, MIB, format_binary_bytes
from paceline.records import CaseValue, Record, RecordStore, latest_per_case
from paceline.records.kinds import PREDICTION

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "course" / "README.md").read_text(encoding="utf-8")

# Every problem of the two courses' hand-outs, and the phrases that its answer must contain.
# Figures from records or from our formulas are in MEASURED instead.
PROBLEMS = {
    "benchmarking_script": ("allocates its moments", "launches", "not synchronised"),
    "nsys_profile": ("253 = 7 × 36 + 1", "Softmax", "permission"),  # noqa: RUF001
    "mixed_precision_accumulation": ("10.0001, 9.9531, 10.0021 and 10.0021", "2⁻⁷"),
    "benchmarking_mixed_precision": ("the loss **float32**",),
    "memory_profiling": ("128 MiB", "*after* the first", "16 bytes per parameter", "100 MiB"),
    "pytorch_attention": ("16,384 tokens", "compute them again", "not synchronised"),
    "torch_compile": ("no committed record of compiled attention", "block by block"),
    "flash_forward": ("logarithm per query",),
    "flash_backward": ("the same in every run",),
    "flash_benchmarking": ("never reached autocast", "2% of the peak", "stores s² scores"),
    "distributed_communication_single_node": ("bus bandwidths", "set-up, timed"),
    "naive_ddp": ("Naive DDP matches baseline!",),
    "toymodel_naive_ddp": ("Naive DDP matches baseline!",),
    "naive_ddp_benchmarking": ("423,183,360 parameters", "1,998,235,200"),
    "transformer_naive_ddp_benchmarking": ("all-reduce benchmark",),
    "minimal_ddp_flat_benchmarking": ("copies",),
    "ddp_overlap_individual_parameters": ("finish_gradient_synchronization",),
    "ddp_overlap_individual_parameters_benchmarking": ("On loopback",),
    "ddp_overlap_bucketed": ("reverse order", "`None` is one bucket"),
    "ddp_bucketed_benchmarking": ("shrink towards the end",),
    "ddp_overhead_equation": (
        *("s/(nw) + no", "√(s/(wo))", "**√(swo)**", "2√(so/w)"),
        *("max(o + s/(nw), T/n + no + s/w", "max(√(T/o),"),
    ),
    "communication_accounting": (
        "3,517.6 GB = 3,276 GiB",
        "17,547,264 bytes per token",
        "41 (GiB) or 44 (GB)",
        "4,095 counts 20 bytes per parameter",
        "N = 35 (GiB) or 38 (GB)",
        "4,096 tokens each need 54 devices",
        "11.6 thousand tokens",
        "25,302 tokens (395 per device)",
        "20,444 (319)",
        "3,908 uses the formula for the best mesh, 641 drops factors",
        "15,700 or 3,925",
        "accumulation and longer context do not",
    ),
    "optimizer_state_sharding": ("to the bit",),
    "optimizer_state_sharding_accounting": ("3Ψ", "2Ψ", "owned unevenly"),
    "fsdp": ("`get_fsdp`", "3Ψ"),
    "chinchilla_isoflops": ("3.5 times too small", "0.78"),
    "scaling_laws": ("2e18 FLOPs to spend", "1e19"),
}


@functools.cache
def _records(store: str) -> list[Record]:
    records = latest_per_case(RecordStore(ROOT / "results" / f"{store}.jsonl").read())
    return [record for record in records if record.kind != PREDICTION]


def _value(store: str, metric: str, **case: CaseValue) -> float:
    """Returns a metric of the only record in a store whose case has these fields."""
    (record,) = (
        record
        for record in _records(store)
        if metric in record.metrics and record.case.items() >= case.items()
    )
    return record.metrics[metric].value


def _ms(store: str, metric: str, **case: CaseValue) -> str:
    return f"{1e3 * _value(store, metric, **case):,.0f}"


def _listed(values: list[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


def _step(strategy: str, **case: CaseValue) -> str:
    return _ms("ddp-2gbit", "step_time_s", strategy=strategy, **case)


def _exposed(strategy: str, **case: CaseValue) -> str:
    return _ms("ddp-2gbit", "exposed_communication_s", strategy=strategy, **case)


def _benchmarking_script() -> list[str]:
    phases = [f"{name}_time_s" for name in ("forward", "backward", "optimizer")]
    small = [f"{_value('step-sizes', phase, model='small'):.2f}" for phase in phases]
    ratios = [
        _value("step-sizes", phases[1], model=model) / _value("step-sizes", phases[0], model=model)
        for model in ("small", "medium", "large")
    ]
    (unwarmed,) = (record for record in _records("step-warmup") if record.case["warmup"] == 0)
    step = unwarmed.metrics["step_time_s"]
    assert step.samples is not None
    return [
        f"take {_listed(small)} s",
        f"backward is {min(ratios):.1f} to {max(ratios):.1f} times forward",
        f"first step takes {step.samples[0]:.2f} s where the median is {step.value:.2f}",
    ]


def _memory_profiling() -> list[str]:
    peaks = {
        (record.case["context"], record.case["precision"]): format_binary_bytes(
            record.metrics["peak_bytes"].value
        ).removesuffix(" GiB")
        for store in ("profile-memory", "profile-step")
        for record in _records(store)
        if record.kind == "memory_timeline" and record.case["phase"] == "train"
    }
    float32 = [peaks[context, "float32"] for context in (128, 256, 512)]
    largest = step_memory(
        model_preset("2.7B"),
        BatchShape(num_sequences=4, context_length=512),
        precision_preset("float32"),
        "none",
        1,
        attention="naive",
    )["before_step"].total
    return [
        f"{_listed(float32)} GiB at contexts 128, 256 and 512",
        f"{peaks[256, 'bfloat16']} instead of {peaks[256, 'float32']} GiB at 256",
        f"{format_binary_bytes(largest)} = {largest / GB:.0f} GB at context 512",
    ]


def _torch_compile() -> list[str]:
    alone = {
        kind: _ms("ddp-compile", "step_time_s", strategy="none", compile=kind)
        for kind in ("none", "blocks", "whole")
    }
    exposed, messages = (
        {
            kind: _ms("ddp-compile", metric, strategy="ddp", compile=kind)
            for kind in ("blocks", "whole")
        }
        for metric in ("exposed_communication_s", "communication_s")
    )
    return [
        f"gains nothing, {alone['whole']} ms against {alone['none']}",
        f"block by block it takes {alone['blocks']}",
        f"{exposed['whole']} of {messages['whole']} ms are exposed, "
        f"{exposed['blocks']} of {messages['blocks']} block by block",
    ]


def _flash_benchmarking() -> list[str]:
    case: dict[str, CaseValue] = {"context": 4096, "head_dim": 64, "dtype": "float32"}
    both = [
        sum(
            _value("attention-flash", metric, implementation=implementation, **case)
            for metric in ("forward_time_s", "backward_time_s")
        )
        for implementation in ("naive", "tiled", "sdpa")
    ]
    naive, tiled, sdpa = (f"{1e3 * seconds:.0f}" for seconds in both)
    long = {**case, "context": 65536, "implementation": "tiled"}
    return [
        f"naive {naive} ms, tiles {tiled} and torch's fused kernel {sdpa}",
        f"the tiles take {_value('attention-flash', 'peak_bytes', **long) / MIB:.0f} MiB",
    ]


def _communication() -> list[str]:
    shaped = [
        _value(
            *("communication-lab", "bus_bandwidth_bytes_per_s"),
            num_hosts=hosts,
            size_bytes=10**8,
            link_rate_bits_per_s=1e9,
        )
        for hosts in (2, 4)
    ]
    loopback = [
        _value(
            *("communication-loopback", "bus_bandwidth_bytes_per_s"),
            world_size=ranks,
            size_bytes=10**9,
        )
        for ranks in (2, 6)
    ]
    return [
        f"two hosts reach {shaped[0] / 1e6:.0f} MB/s and four {shaped[1] / 1e6:.0f}",
        f"{loopback[0] / 1e9:.2f} GB/s for two ranks and {loopback[1] / 1e9:.2f} for six",
    ]


def _bucketed() -> list[str]:
    caps = (1.0, 10.0, 100.0, 1000.0)
    steps = [_step("ddp", bucket_size_mb=cap) for cap in caps]
    ours = sorted(int(_exposed("ddp", bucket_size_mb=cap)) for cap in caps)
    torchs = [_exposed("torch_ddp", bucket_size_mb=cap) for cap in caps]
    return [
        f"{_listed(steps)} ms at 1, 10, 100 and 1000 MiB",
        f"leave {ours[0]} to {ours[-1]} ms exposed at every cap",
        f"torch's leave {_listed(torchs)}",
    ]


def _sharding() -> list[str]:
    without, with_it = (
        [
            format_binary_bytes(_value("sharding-memory", f"peak_{instant}_bytes", strategy=name))
            for instant in ("after_init", "before_step", "after_step")
        ]
        for name in ("torch_ddp", "zero1")
    )
    xl = [
        step_memory(
            model_preset("xl"),
            BatchShape(num_sequences=4, context_length=128),
            precision_preset("float32"),
            name,
            2,
        )["after_step"].total
        for name in ("torch_ddp", "zero1")
    ]
    steps = [
        _ms("sharding-memory", "step_time_s", strategy=name) for name in ("torch_ddp", "zero1")
    ]
    slow = [_ms("sharding-1gbit", "step_time_s", strategy=name) for name in ("zero1", "torch_zero")]
    assert without[0] == with_it[0]
    bare = [text.removesuffix(" GiB") for text in with_it]
    return [
        f"{without[0]} after init with and without",
        f"before the step {without[1]} without and {bare[1]} with",
        f"after it {without[2].removesuffix(' GiB')} and {bare[2]}",
        f"{xl[0] / 2**30:.1f} GiB and {xl[1] / 2**30:.1f}",
        f"{steps[0]} ms without and {steps[1]} with",
        f"takes {slow[0]} ms, with torch's `ZeroRedundancyOptimizer` {slow[1]}",
    ]


def _fsdp() -> list[str]:
    plain, divided = (
        format_binary_bytes(_value("sharding-memory", "peak_before_step_bytes", strategy=name))
        for name in ("torch_ddp", "fsdp")
    )
    ours, torchs = (
        _ms("sharding-1gbit", "step_time_s", strategy=name) for name in ("fsdp", "torch_fsdp2")
    )
    return [
        f"peaks at {divided} instead of {plain.removesuffix(' GiB')}",
        f"takes {ours} ms, with torch's `fully_shard` {torchs}",
    ]


def _chinchilla() -> list[str]:
    def best(method: str, metric: str, budget: float) -> str:
        value = _value("scaling-course", metric, method=method, compute_budget=budget)
        return f"{value:.2e}".replace("e+", "e")

    first, second = (
        [best("parabola", metric, budget) for metric in ("parameters", "tokens")]
        for budget in (1e23, 1e24)
    )
    surface = [
        f"{best('parametric', 'parameters', budget)} and {best('parametric', 'tokens', budget)}"
        for budget in (1e23, 1e24)
    ]
    lowest = [best("lowest_run", "parameters", budget) for budget in (1e23, 1e24)]
    less = 1 - float(lowest[1]) / float(best("parametric", "parameters", 1e24))
    return [
        f"{first[0]} parameters and {first[1]} tokens at 1e23 FLOPs",
        f"{second[0]} and {second[1]} at 1e24",
        f"the surface behind the data says {', '.join(surface)}",
        f"{lowest[0]} parameters at 1e23 and {lowest[1]} at 1e24, {less:.0%} less",
    ]


def _scaling_laws() -> list[str]:
    design, grid = (
        [
            f"{_value('scaling-studies', 'root_mean_square', study=study, noise=noise):.3f}"
            for noise in (0.003, 0.01)
        ]
        for study in ("error of the design", "error of the uniform")
    )
    return [
        f"{design[0]} (root mean square) with 0.3% of noise and {design[1]} with 1%",
        f"an even grid has {grid[0]} and {grid[1]}",
    ]


# Functions that phrase committed records and results of our formulas as the page does.
MEASURED: dict[str, Callable[[], list[str]]] = {
    "benchmarking_script": _benchmarking_script,
    "memory_profiling": _memory_profiling,
    "torch_compile": _torch_compile,
    "flash_benchmarking": _flash_benchmarking,
    "distributed_communication_single_node": _communication,
    "naive_ddp_benchmarking": lambda: [
        f"{_step('naive')} ms per step at 2 Gbit/s",
        f"{_exposed('naive')} ms are communication that nothing hides",
        f"in {_value('ddp-2gbit', 'num_messages', strategy='naive'):.0f} messages",
    ],
    "transformer_naive_ddp_benchmarking": lambda: [
        f"75 calls cost {int(_exposed('naive')) - int(_exposed('flat'))} ms more than one"
    ],
    "minimal_ddp_flat_benchmarking": lambda: [
        f"{_step('flat')} ms instead of {_step('naive')}",
        f"{_exposed('flat')} ms exposed instead of {_exposed('naive')}",
    ],
    "ddp_overlap_individual_parameters_benchmarking": lambda: [
        f"{_step('overlapped')} ms instead of {_step('naive')} at 2 Gbit/s",
        f"{_exposed('overlapped')} ms of "
        f"{_ms('ddp-2gbit', 'communication_s', strategy='overlapped')} stay exposed",
    ],
    "ddp_bucketed_benchmarking": _bucketed,
    "optimizer_state_sharding_accounting": _sharding,
    "fsdp": _fsdp,
    "chinchilla_isoflops": _chinchilla,
    "scaling_laws": _scaling_laws,
}

SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE))


def _entries(problem: str, label: str) -> list[str]:
    return re.findall(
        rf"^- \*\*{label}:\*\* (.*?)(?=^- |\Z)", SECTIONS[problem], re.DOTALL | re.MULTILINE
    )


def _commands() -> list[str]:
    lines = [line for problem in SECTIONS for line in _entries(problem, "Run")]
    return sorted({re.sub(r"\s+", " ", line).strip().strip("`") for line in lines})


def _names() -> list[str]:
    return sorted(
        {
            name
            for problem in SECTIONS
            for entry in _entries(problem, "Read")
            for name in re.findall(r"`(paceline[\w.]*)`", entry)
        }
    )


def test_every_problem_is_there_once_and_linked_from_the_top() -> None:
    assert list(SECTIONS) == re.findall(r"\(#(\w+)\)", TEXT)
    assert set(SECTIONS) == set(PROBLEMS)


def _answer(problem: str) -> str:
    (answer,) = _entries(problem, "Answer")
    return re.sub(r"\s+", " ", answer)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_problem_has_command_code_page_and_answer(problem: str) -> None:
    assert _entries(problem, "Run")
    assert _entries(problem, "Read")
    assert "docs/" in "".join(_entries(problem, "See"))
    missing = [fact for fact in PROBLEMS[problem] if fact not in _answer(problem)]
    assert not missing


@pytest.mark.parametrize("problem", MEASURED)
def test_figures_are_those_of_the_records(problem: str) -> None:
    missing = [phrase for phrase in MEASURED[problem]() if phrase not in _answer(problem)]
    assert not missing


@pytest.mark.parametrize("command", _commands())
def test_a_command_is_one_that_exists(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "paceline":
        parse(words[1:])
        if "--" in words:
            parse(words[words.index("--") + 2 :])
    else:
        assert words[0] in ("python", "scripts/test")
        assert (ROOT / words[1]).exists()


@pytest.mark.parametrize("name", _names())
def test_a_name_can_be_imported(name: str) -> None:
    pkgutil.resolve_name(name)


def test_the_adapters_that_are_named_exist() -> None:
    names = re.findall(r"`((?:get|fsdp)_\w+)`", TEXT)
    assert len(names) >= 3
    adapters = (ROOT / "tests" / "adapters.py").read_text(encoding="utf-8")
    assert [name for name in names if f"\ndef {name}(" not in adapters] == []


COURSE_TEST = """
import torch

from .adapters import get_flashattention_autograd_function_pytorch


def test_forward():
    query, key, value = (torch.randn(2, 16, 8, requires_grad=True) for _ in range(3))
    output = get_flashattention_autograd_function_pytorch().apply(query, key, value, False)
    expected = torch.softmax(query @ key.mT / 8**0.5, dim=-1) @ value
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
"""


def test_the_adapters_work_in_a_checkout_of_a_course(tmp_path: pathlib.Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    (tests / "test_attention.py").write_text(COURSE_TEST)
    shutil.copy(ROOT / "tests" / "adapters.py", tests)
    code = "from tests.test_attention import test_forward; test_forward()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
