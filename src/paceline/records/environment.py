"""The environment of a record: versions, commit and machine.

This module does not import torch: the caller passes device names. Host names and paths are not
stored, because records are published.
"""

import contextlib
import datetime
import functools
import importlib.metadata
import pathlib
import platform
import subprocess
from collections.abc import Sequence

import msgspec

import paceline
from paceline.core.host import available_processors, physical_memory_bytes

_PACKAGES = ("torch", "numpy", "triton")


class Environment(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Properties of a machine and its software that may explain differences in results."""

    time: str
    """Time of the record, UTC, ISO 8601."""
    paceline: str
    """Version of Paceline."""
    commit: str | None = None
    """Commit of the checkout that Paceline ran from; None for an installed package."""
    modified: bool | None = None
    """Whether that checkout differed from its commit."""
    python: str
    """Version of Python."""
    platform: str
    """Operating system and architecture."""
    processor: str
    """Model name of the CPU."""
    num_processors: int
    """CPUs that this process may use."""
    memory_bytes: int | None = None
    """Physical memory."""
    packages: dict[str, str] = {}
    """Versions of the libraries that affect performance."""
    devices: tuple[str, ...] = ()
    """Accelerators, as named by their driver."""
    backends: tuple[str, ...] = ()
    """Collective libraries that torch can use."""


def capture_environment(
    *, devices: Sequence[str] = (), backends: Sequence[str] = ()
) -> Environment:
    """Describes this machine and this installation of Paceline.

    `devices` and `backends` are the accelerators and collective libraries that torch reports.
    """
    commit, modified = _checkout_state()
    return Environment(
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        paceline=paceline.__version__,
        commit=commit,
        modified=modified,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor_name(),
        num_processors=available_processors(),
        memory_bytes=physical_memory_bytes(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        devices=tuple(devices),
        backends=tuple(backends),
    )


def processor_name() -> str:
    """Returns the CPU's model name, as the operating system reports it."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def network_links() -> list[str]:
    """Returns the network interfaces with their line rate, if the kernel reports it."""
    links = []
    for interface in sorted(pathlib.Path("/sys/class/net").glob("*")):
        try:
            rate = int((interface / "speed").read_text())
        except (OSError, ValueError):
            rate = -1
        links.append(f"{interface.name} {f'{rate} Mbit/s' if rate > 0 else 'rate unknown'}")
    for port in sorted(pathlib.Path("/sys/class/infiniband").glob("*/ports/*/rate")):
        links.append(f"{port.parts[-4]} port {port.parts[-2]} {port.read_text().strip()}")
    return links


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _checkout_state() -> tuple[str | None, bool | None]:
    package = pathlib.Path(__file__).resolve().parents[1]
    checkout = package.parents[1]
    # An installed package may be inside an unrelated checkout, whose commit says nothing about
    # Paceline. So only the layout of our own source tree is accepted.
    if package != checkout / "src" / "paceline" or not (checkout / ".git").exists():
        return None, None
    commit = _git(checkout, "rev-parse", "HEAD")
    status = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return commit, None if status is None else bool(status)


def _git(checkout: pathlib.Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(checkout), *arguments]
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None
