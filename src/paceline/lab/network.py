"""Hosts in network namespaces, connected by a switch over links with a chosen rate.

A namespace exists as long as a process is in it. Each host has one idle holder process that reads
from a pipe whose write end only this process has. When this process exits for any reason, the pipe
closes, each holder kills the remaining processes on its host and exits, and the kernel removes
namespaces, links and shaping. Namespaces are anonymous, so they cannot leak or collide.

As root, namespaces are created directly; otherwise inside a user namespace, if the kernel allows
it. Hosts cannot reach the outside: the switch has no uplink.

`measure_link` measures the real rate of a link with one short TCP stream from `send` on one host to
`receive` on another, which counts the payload.
"""

import contextlib
import dataclasses
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from paceline.core.errors import PacelineError, UsageError
from paceline.core.processes import die_with_parent, end_processes
from paceline.core.units import parse_quantity

INTERFACE = "eth0"
_NETWORK = "10.77.0"
_MAX_HOSTS = 250
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}

# `cat` echoes until its standard input closes, that is, until the lab is gone. Then every other
# process in the namespace is killed, in several rounds because it may be forking.
_HOLDER = """
cat
own=$(readlink /proc/self/ns/net)
for round in 1 2 3; do
    for process in /proc/[0-9]*; do
        pid=${process#/proc/}
        if [ "$pid" != $$ ] && [ "$(readlink "$process/ns/net" 2>/dev/null)" = "$own" ]; then
            kill -9 "$pid" 2>/dev/null
        fi
    done
done
"""
_HOLDER_GRACE_S = 5.0
_RUN_INSIDE = "from paceline.lab.network import run_inside; run_inside()"
_RECEIVE = "from paceline.lab.network import receive; receive()"
_SEND = "from paceline.lab.network import send; send()"

# Queue length as the time to drain it; packets beyond it are dropped, as by a switch.
_QUEUE_S = 0.2
# Bytes that the token bucket passes at once. A large burst lets small messages exceed the rate; one
# below the 64 KiB of a segmentation-offload packet would drop such packets.
_MINIMUM_BURST_BYTES = 64 * 1024
_BURST_S = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkShape:
    """The link between a host and the switch, symmetric in both directions."""

    rate_bits_per_s: float | None = None
    """Rate in bits per second; None for unlimited."""
    delay_s: float = 0.0
    """Delay added to each packet between two hosts."""
    loss: float = 0.0
    """Fraction of packets dropped on arrival."""

    def __post_init__(self) -> None:
        if self.rate_bits_per_s is not None and not self.rate_bits_per_s >= 1e6:
            raise UsageError("a link's rate must be at least 1mbit")
        if not 0 <= self.delay_s <= 10:
            raise UsageError("a link's delay must be between 0 and 10s")
        if not 0 <= self.loss < 1:
            raise UsageError("a link's loss must be at least 0% and below 100%")

    @property
    def bucket_arguments(self) -> list[str]:
        """The `tc` arguments of a token bucket filter for this rate."""
        rate = self.rate_bits_per_s or 0.0
        burst = max(_MINIMUM_BURST_BYTES, int(rate / 8 * _BURST_S))
        limit = burst + int(rate / 8 * _QUEUE_S)
        return ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "limit", f"{limit}b"]


def parse_loss(text: str) -> float:
    """Parses a loss such as ``1%`` into a fraction."""
    return parse_quantity(text, {"%": 0.01}, "loss", "1%")


class LabError(PacelineError):
    """The machine cannot provide the requested network."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A virtual host with its own network interfaces, routes and ports."""

    index: int
    """Index of the host, from 0."""
    address: str
    """Address on the network shared by the hosts."""
    prefix: tuple[str, ...]
    """Words that prefix a command to run it on this host."""

    def run(self, *command: str) -> str:
        """Runs a command on this host and returns its output; raises an error if it fails.

        Args:
            command: The program and its arguments.
        """
        return run_command([*self.prefix, *command])

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command line that runs a command on this host and dies with this process.

        Args:
            words: The program and its arguments.
        """
        return [*self.prefix, sys.executable, "-c", _RUN_INSIDE, str(os.getpid()), *words]


@contextlib.contextmanager
def hosts(count: int, link: LinkShape | None = None) -> Iterator[list[Host]]:
    """Creates hosts connected by a switch, each over its own link.

    Args:
        count: Number of hosts.
        link: Rate, delay and loss of every host's link; unshaped by default.
    """
    link = link or LinkShape()
    if not 1 <= count <= _MAX_HOSTS:
        raise LabError(f"the lab has 1 to {_MAX_HOSTS} hosts, not {count}")
    _require_tools(link)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespace(()))
        run_command([*switch, "ip", "link", "add", "switch", "type", "bridge"])
        run_command([*switch, "ip", "link", "set", "switch", "up"])
        if link.delay_s > 0:
            _require_netem(switch)
        made = []
        for index in range(count):
            inside = stack.enter_context(_namespace(_without_network(switch)))
            made.append(_connect(switch, inside, index, link))
        yield made


def run_inside() -> None:
    """Replaces this process, which was started inside a host, with the command of its arguments.

    Entering a user namespace clears the parent-death signal, so it is set here, after entering.
    """
    parent_pid, *command = sys.argv[1:]
    die_with_parent(int(parent_pid))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        sys.exit(127)


def _connect(switch: tuple[str, ...], inside: tuple[str, ...], index: int, link: LinkShape) -> Host:
    port = f"port{index}"
    holder_pid = inside[inside.index("--target") + 1]
    address = f"{_NETWORK}.{index + 1}"
    run_command(
        [*switch, "ip", "link", "add", port, "type", "veth", "peer", "name", f"{port}-host"]
    )
    run_command([*switch, "ip", "link", "set", f"{port}-host", "netns", holder_pid])
    run_command([*switch, "ip", "link", "set", port, "master", "switch", "up"])
    host = Host(index=index, address=address, prefix=inside)
    host.run("ip", "link", "set", f"{port}-host", "name", INTERFACE)
    host.run("ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "link", "set", INTERFACE, "up")
    # Both ends limit the rate: the host's end for sending, the switch's end for receiving. Traffic
    # between hosts is delayed once, on egress.
    _shape(inside, INTERFACE, link)
    _shape(switch, port, dataclasses.replace(link, delay_s=0.0))
    if link.loss > 0:
        probability = ["-m", "statistic", "--mode", "random", "--probability", f"{link.loss:.6f}"]
        host.run("iptables", "-A", "INPUT", "-i", INTERFACE, *probability, "-j", "DROP")
    return host


def _shape(prefix: tuple[str, ...], device: str, link: LinkShape) -> None:
    parent = ["root"]
    if link.delay_s > 0:
        delay = f"{link.delay_s * 1e6:.0f}us"
        netem = ["root", "handle", "1:", "netem", "delay", delay, "limit", "100000"]
        run_command([*prefix, "tc", "qdisc", "add", "dev", device, *netem])
        parent = ["parent", "1:1"]
    if link.rate_bits_per_s is not None:
        run_command([*prefix, "tc", "qdisc", "add", "dev", device, *parent, *link.bucket_arguments])


@contextlib.contextmanager
def _namespace(prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Creates a namespace and yields the prefix that runs a command in it."""
    # Without root, only the first namespace creates a user namespace; the others enter it.
    new_user = [] if _is_root() or prefix else ["--user", "--map-root-user"]
    holder = subprocess.Popen(
        [*prefix, "unshare", *new_user, "--net", "sh", "-c", _HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _wait_until_held(holder)
        user = () if _is_root() else ("--user", "--preserve-credentials")
        yield ("nsenter", "--target", str(holder.pid), *user, "--net")
    finally:
        assert holder.stdin is not None
        with contextlib.suppress(OSError):
            holder.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            holder.wait(_HOLDER_GRACE_S)
        end_processes([holder])
        for stream in (holder.stdout, holder.stderr):
            assert stream is not None
            stream.close()


def _wait_until_held(holder: subprocess.Popen[bytes]) -> None:
    """Waits until the holder replies, which proves that it has entered its namespace."""
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        holder.stdin.write(b"?\n")
        holder.stdin.flush()
        answered = holder.stdout.readline() == b"?\n"
    except OSError:
        answered = False
    if not answered:
        assert holder.stderr is not None
        complaint = holder.stderr.read().decode(errors="replace").strip()
        raise LabError(
            f"the kernel does not let this user create network namespaces ({complaint}); run as "
            "root, or allow unprivileged user namespaces"
        )


def _is_root() -> bool:
    return os.geteuid() == 0


def _without_network(prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the prefix that enters the same user namespace but not its network namespace."""
    return () if _is_root() else tuple(word for word in prefix if word != "--net")


def _require_tools(link: LinkShape) -> None:
    tools = _TOOLS | ({"iptables": "iptables"} if link.loss > 0 else {})
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            raise LabError(f"{tool} is not installed; it is in the package {package}")


def _require_netem(switch: tuple[str, ...]) -> None:
    try:
        run_command(
            [*switch, "tc", "qdisc", "add", "dev", "switch", "root", "netem", "delay", "1ms"]
        )
    except LabError as error:
        raise LabError(
            "--delay needs netem (sch_netem), which this kernel does not have; leave it out"
        ) from error
    run_command([*switch, "tc", "qdisc", "del", "dev", "switch", "root"])


def run_command(command: list[str]) -> str:
    """Runs a command and returns its output; raises a `LabError` if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if result.returncode != 0:
        shown = " ".join(command)
        raise LabError(f"`{shown}` failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


_WARMUP_S = 0.15
_DURATION_S = 0.8
# The rate is the median over windows, so that scheduling pauses of this process do not affect it.
_WINDOW_S = 0.05
_CHUNK_BYTES = 1 << 16
# Data still queued when the sender stops must drain, so the buffer holds a fraction of a second.
_BUFFER_S = 0.1
_BUFFER_BYTES_RANGE = (1 << 16, 1 << 22)
_TIMEOUT_S = 20.0


def measure_link(sender: Host, receiver: Host, rate_bits_per_s: float | None = None) -> float:
    """Returns the rate at which payload arrives from one host at another, in bits per second."""
    smallest, largest = _BUFFER_BYTES_RANGE
    queue_bytes = largest if rate_bits_per_s is None else int(rate_bits_per_s / 8 * _BUFFER_S)
    buffer_bytes = min(largest, max(smallest, queue_bytes))
    program = [sys.executable, "-c"]
    listen = [*receiver.prefix, *program, _RECEIVE, receiver.address]
    receiving = subprocess.Popen(listen, stdout=subprocess.PIPE, text=True)
    try:
        assert receiving.stdout is not None
        port = receiving.stdout.readline().strip()
        sender.run(*program, _SEND, receiver.address, port, str(buffer_bytes))
        measured, _ = receiving.communicate(timeout=_TIMEOUT_S)
        return float(measured)
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise LabError(f"no data passes the link between the hosts: {error}") from error
    finally:
        receiving.kill()
        receiving.wait()


def receive() -> None:
    """Listens on the address in its arguments; prints the port, then the bits per second."""
    address = sys.argv[1]
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_TIMEOUT_S)
        buffer = bytearray(_CHUNK_BYTES)
        begin = time.perf_counter()
        # Exclude the token bucket's burst and TCP slow start.
        while time.perf_counter() - begin < _WARMUP_S:
            connection.recv_into(buffer)
        rates = []
        begin, num_bytes = time.perf_counter(), 0
        while count := connection.recv_into(buffer):
            num_bytes += count
            elapsed = time.perf_counter() - begin
            if elapsed >= _WINDOW_S:
                rates.append(num_bytes * 8 / elapsed)
                begin, num_bytes = time.perf_counter(), 0
    sys.stdout.write(f"{statistics.median(rates)}\n")


def send() -> None:
    """Sends to the address and port of its arguments; the third is the size of the buffer."""
    address, port, buffer_bytes = sys.argv[1:]
    with socket.create_connection((address, int(port)), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(buffer_bytes))
        chunk = bytes(_CHUNK_BYTES)
        deadline = time.perf_counter() + _WARMUP_S + _DURATION_S
        while time.perf_counter() < deadline:
            connection.sendall(chunk)
