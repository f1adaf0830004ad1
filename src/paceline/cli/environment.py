"""``paceline env``: shows this machine's hardware and software, and tests what runs on it."""

import dataclasses
from typing import TYPE_CHECKING

from paceline.cli.output import Flat, OutputOptions, say
from paceline.core.hardware import CUDA

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.kernels.attention.self_test import SelfTest
    from paceline.records import Metric, Record

_SELF_TEST_RANKS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentCommand:
    """Show versions, devices, backends and links; test communication and attention kernels."""

    self_test: bool = False
    """Check an all-reduce between two ranks; on CUDA, also compare Triton attention with SDPA."""
    output: Flat[OutputOptions] = dataclasses.field(default_factory=OutputOptions)

    def run(self) -> int:
        """Prints the environment; raises an error if the self-test fails."""
        from paceline.benchmarks.harness import measure
        from paceline.devices import accelerator
        from paceline.devices.hardware import describe_hardware
        from paceline.records import Record
        from paceline.records.environment import network_links

        case = describe_hardware(measure.resolve_device("auto")).as_case()
        case["self_test"] = self.self_test
        metrics: dict[str, Metric] = {}
        if self.self_test:
            enough = accelerator.num_accelerators() >= _SELF_TEST_RANKS
            backend = accelerator.default_backend(
                accelerator.device_type("auto" if enough else "cpu")
            )
            case |= {"world_size": _SELF_TEST_RANKS, "backend": backend}
            metrics["all_reduce_time_s"] = _self_test(backend)
        environment = measure.current_environment()
        links = [*accelerator.peer_links(), *network_links()]
        # Last: a kernel that fails may leave the device unusable for this process.
        attention_tests = _test_attention() if self.self_test else []
        record = Record(
            kind="environment", case=case, environment=environment, metrics=metrics, outcome="ok"
        )
        self.output.show([record, *attention_tests], _table(record, links))
        return 0


def _self_test(backend: str) -> "Metric":
    from paceline.benchmarks.collectives import all_reduce_self_test
    from paceline.parallel import run_ranks
    from paceline.records import Metric

    say(
        f"paceline: starting {_SELF_TEST_RANKS} ranks that all-reduce 1 MiB over {backend}; "
        "loading torch takes up to half a minute"
    )
    times_by_rank = run_ranks(all_reduce_self_test, _SELF_TEST_RANKS, backend=backend)
    return Metric.from_samples([max(times) for times in zip(*times_by_rank, strict=True)])


def _test_attention() -> "list[SelfTest]":
    """Compares the Triton kernels with SDPA on one CUDA device of each kind."""
    from paceline.devices import accelerator
    from paceline.kernels.attention.api import triton_obstacle
    from paceline.kernels.attention.self_test import run_self_test, setting_of

    if accelerator.accelerator_type() != CUDA:
        say("paceline: there is no CUDA device to test the Triton attention kernels on")
        return []
    tests: dict[str, SelfTest] = {}
    for device in accelerator.all_accelerators():
        obstacle = triton_obstacle(device)
        if obstacle is not None:
            say(f"paceline: the Triton attention kernels are not tested on {device}: {obstacle}")
        elif (setting := setting_of(device)) not in tests:
            say(
                f"paceline: comparing the Triton attention kernels with SDPA on {device}; "
                "compiling them takes a few minutes"
            )
            tests[setting] = run_self_test(device)
    return list(tests.values())


def _attention_by_device() -> str:
    """Returns which attention is used on each device, and why."""
    from paceline.devices import accelerator
    from paceline.kernels import explain_backend

    names = [str(device) for device in accelerator.all_accelerators()] or ["cpu"]
    return "\n".join(f"{name}: {explain_backend(name)}" for name in names)


def _table(record: "Record", links: list[str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    from paceline.core.units import format_binary_bytes, format_seconds

    environment = record.environment
    rows = {
        "paceline": environment.paceline,
        "commit": environment.commit or "installed, not a checkout",
        "python": environment.python,
        **environment.packages,
        "platform": environment.platform,
        "processor": f"{environment.processor}, {environment.num_processors} usable",
        "memory": format_binary_bytes(environment.memory_bytes or 0),
        "threads": str(record.case["threads"]),
        "accelerators": ", ".join(environment.devices) or "none",
        "backends": ", ".join(environment.backends),
        "links": "\n".join(links),
        "attention": _attention_by_device(),
    }
    if (time := record.metrics.get("all_reduce_time_s")) is not None:
        rows["self-test"] = (
            f"passed: {record.case['world_size']} ranks, {record.case['backend']}, "
            f"1 MiB all-reduce in {format_seconds(time.value)}"
        )
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, Text(value))  # Verbatim: brackets are not markup.
    return table
