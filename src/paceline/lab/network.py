"""Hosts in network namespaces, connected by a switch over links with a chosen rate.

Hosts may be in several sites: each site has a switch of its own, and one uplink, which its hosts
share, to a switch between the sites. All switches are in one namespace. Without netem, a `relay`
between the sites delays what passes.

A namespace exists as long as a process is in it. Each host has one idle holder process that reads
from a pipe whose write end only this process has. When this process exits for any reason, the pipe
closes, each holder kills the remaining processes on its host and exits, and the kernel removes
namespaces, links and shaping. Namespaces are anonymous, so they cannot leak or collide.

As root, namespaces are created directly; otherwise inside a user namespace, if the kernel allows
it. Hosts cannot reach the outside: no switch is connected to anything else.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from paceline.core.errors import PacelineError, UsageError
from paceline.core.processes import die_with_parent, end_processes
from paceline.core.units import parse_quantity

INTERFACE = "eth0"
# A host's address has the index of its site and its place there, from 1.
_NETWORK = "10.77"
_MAX_HOSTS = 250
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "find": "findutils",
}

# `cat` echoes until its standard input closes, that is, until the lab is gone. Then every other
# process in the namespace is killed, in several rounds because it may be forking.
_HOLDER = """
cat
for round in 1 2 3; do
    for link in $(find -L /proc/[0-9]*/ns/net -samefile /proc/$$/ns/net 2>/dev/null); do
        process=${link%/ns/net}
        pid=${process#/proc/}
        [ "$pid" = $$ ] || kill -9 "$pid" 2>/dev/null
    done
done
"""
_HOLDER_GRACE_S = 5.0
_RUN_INSIDE = "from paceline.lab.network import run_inside; run_inside()"
_RELAY = "from paceline.lab.relay import relay; relay()"

# Queue length as the time to drain it; packets beyond it are dropped, as by a switch.
_QUEUE_S = 0.2
# Bytes that the token bucket passes at once. A large burst lets small messages exceed the rate; one
# below the 64 KiB of a segmentation-offload packet would drop such packets.
_MINIMUM_BURST_BYTES = 64 * 1024
_BURST_S = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkShape:
    """The link of a host, or the uplink of a site, to its switch; the same in both directions."""

    rate_bits_per_s: float | None = None
    """Rate in bits per second; None for unlimited."""
    delay_s: float = 0.0
    """Delay added to each packet between two hosts, or two sites."""
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
    """Index of the host among those of all sites, from 0, site by site."""
    site: int
    """Index of its site, from 0."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """Hosts that share a switch, and an uplink to all other sites."""

    index: int
    """Index of the site, from 0."""
    hosts: tuple[Host, ...]
    """The hosts of this site."""
    switch: tuple[str, ...]
    """Words that prefix a command to run it where the switches are."""

    def set_uplink(self, *, is_up: bool) -> None:
        """Takes the uplink down, so that nothing passes between this site and others, or up again.

        Args:
            is_up: Whether the uplink carries packets from now on.
        """
        state = "up" if is_up else "down"
        run_command([*self.switch, "ip", "link", "set", _uplink(self.index), state])


@contextlib.contextmanager
def hosts(count: int, link: LinkShape | None = None) -> Iterator[list[Host]]:
    """Creates hosts connected by a switch, each over its own link.

    Args:
        count: Number of hosts.
        link: Rate, delay and loss of every host's link; unshaped by default.
    """
    with sites(1, count, link) as (site,):
        yield list(site.hosts)


@contextlib.contextmanager
def sites(
    count: int, hosts_per_site: int, link: LinkShape | None = None, uplink: LinkShape | None = None
) -> Iterator[list[Site]]:
    """Creates sites whose hosts are connected by a switch, and whose switches by uplinks.

    Args:
        count: Number of sites; a single one has no uplink.
        hosts_per_site: Number of hosts of every site.
        link: Rate, delay and loss of every host's link; unshaped by default.
        uplink: Rate of every site's uplink, and delay and loss from one site to another; unshaped
            by default.
    """
    if count < 1 or not 1 <= count * hosts_per_site <= _MAX_HOSTS:
        raise LabError(f"the lab has 1 to {_MAX_HOSTS} hosts, not {count * hosts_per_site}")
    if count == 1 and uplink is not None:
        raise UsageError(
            "--site-rate, --site-delay and --site-loss are of the uplinks between sites; add "
            "--sites 2, or shape the links of hosts with --rate, --delay and --loss"
        )
    link, uplink = link or LinkShape(), uplink or LinkShape()
    _require_tools(needs_iptables=link.loss > 0 or uplink.loss > 0)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespace(()))
        if link.delay_s > 0 and not _has_netem(switch):
            raise LabError(
                "--delay needs netem (sch_netem), which this kernel does not have; leave it out, "
                "or put the hosts in sites: --site-delay needs nothing"
            )
        made = []
        for index in range(count):
            bridge = _add_bridge(switch, f"site{index}")
            inside = []
            for place in range(hosts_per_site):
                namespace = stack.enter_context(_namespace(_without_network(switch)))
                host = Host(
                    index=index * hosts_per_site + place,
                    site=index,
                    address=f"{_NETWORK}.{index}.{place + 1}",
                    prefix=namespace,
                )
                _connect(switch, bridge, host, link, uplink.loss)
                inside.append(host)
            made.append(Site(index=index, hosts=tuple(inside), switch=switch))
        if count > 1:
            stack.enter_context(_uplinks(switch, count, uplink))
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


def _add_bridge(switch: tuple[str, ...], name: str) -> str:
    run_command([*switch, "ip", "link", "add", name, "type", "bridge"])
    run_command([*switch, "ip", "link", "set", name, "up"])
    return name


def _connect(
    switch: tuple[str, ...], bridge: str, host: Host, link: LinkShape, loss_between_sites: float
) -> None:
    port = f"port{host.index}"
    holder_pid = host.prefix[host.prefix.index("--target") + 1]
    run_command(
        [*switch, "ip", "link", "add", port, "type", "veth", "peer", "name", f"{port}-host"]
    )
    run_command([*switch, "ip", "link", "set", f"{port}-host", "netns", holder_pid])
    run_command([*switch, "ip", "link", "set", port, "master", bridge, "up"])
    host.run("ip", "link", "set", f"{port}-host", "name", INTERFACE)
    host.run("ip", "addr", "add", f"{host.address}/16", "dev", INTERFACE)
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "link", "set", INTERFACE, "up")
    # Both ends limit the rate: the host's end for sending, the switch's end for receiving. Traffic
    # between hosts is delayed once, on egress.
    _shape(host.prefix, INTERFACE, link)
    _shape(switch, port, dataclasses.replace(link, delay_s=0.0))
    _drop(host, link.loss)
    # A bridge has no packet filter, so what an uplink loses is dropped by the host behind it.
    _drop(host, loss_between_sites, "!", "-s", f"{_NETWORK}.{host.site}.0/24")


def _drop(host: Host, loss: float, *of: str) -> None:
    """Makes a host drop this fraction of the packets that arrive, or of those that match `of`."""
    if loss > 0:
        chance = ["-m", "statistic", "--mode", "random", "--probability", f"{loss:.6f}"]
        host.run("iptables", "-A", "INPUT", "-i", INTERFACE, *of, *chance, "-j", "DROP")


def _uplink(site: int) -> str:
    return f"uplink{site}"


@contextlib.contextmanager
def _uplinks(switch: tuple[str, ...], count: int, shape: LinkShape) -> Iterator[None]:
    """Connects the sites: each by a shaped uplink, whose other end is at the wide-area switch."""
    undelayed = dataclasses.replace(shape, delay_s=0.0)
    is_relayed = shape.delay_s > 0 and not _has_netem(switch)
    ends = [f"wan{index}" for index in range(count)]
    for index, end in enumerate(ends):
        uplink = _uplink(index)
        run_command([*switch, "ip", "link", "add", uplink, "type", "veth", "peer", "name", end])
        run_command([*switch, "ip", "link", "set", uplink, "master", f"site{index}", "up"])
        run_command([*switch, "ip", "link", "set", end, "up"])
        # As with a host's link, both ends limit the rate and one delays.
        _shape(switch, uplink, undelayed if is_relayed else shape)
        _shape(switch, end, undelayed)
    if is_relayed:
        with _relay(switch, ends, shape.delay_s):
            yield
        return
    bridge = _add_bridge(switch, "wan")
    for end in ends:
        run_command([*switch, "ip", "link", "set", end, "master", bridge])
    yield


@contextlib.contextmanager
def _relay(switch: tuple[str, ...], ends: Sequence[str], delay_s: float) -> Iterator[None]:
    """Forwards frames between interfaces of the switches' namespace, each after the delay."""
    with subprocess.Popen(
        [*switch, sys.executable, "-c", _RELAY, repr(delay_s), *ends],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            if not process.stdout.readline():
                *_, complaint = process.stderr.read().splitlines() or ["it ended"]
                raise LabError(f"cannot delay packets between sites: {complaint}")
            yield
        finally:
            process.kill()


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


def _require_tools(*, needs_iptables: bool) -> None:
    tools = _TOOLS | ({"iptables": "iptables"} if needs_iptables else {})
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            raise LabError(f"{tool} is not installed; it is in the package {package}")


def _has_netem(switch: tuple[str, ...]) -> bool:
    queue = [*switch, "tc", "qdisc"]
    try:
        run_command([*queue, "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except LabError:
        return False
    run_command([*queue, "del", "dev", "lo", "root"])
    return True


def run_command(command: list[str]) -> str:
    """Runs a command and returns its output; raises a `LabError` if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if result.returncode != 0:
        shown = " ".join(command)
        raise LabError(f"`{shown}` failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout
