"""Tests of the lab's sites: what their uplinks carry, delay, lose and share, and who is where."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from paceline.lab import Host, LabError, LinkShape, sites
from paceline.lab.bandwidth import measure_link
from paceline.lab.faults import FAULTS, Fault, TargetRun
from tests.end_to_end.test_communication import BIN, require_lab

pytestmark = pytest.mark.host("how ranks find each other")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def _needs_lab() -> None:
    require_lab()


def _lab_run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "paceline"), "lab", "run", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )


def _reaches(host: Host, other: Host) -> bool:
    # An answer in five is enough: a busy machine may be late with one.
    try:
        host.run("ping", "-c", "5", "-i", "0.2", "-W", "1", other.address)
    except LabError:
        return False
    return True


def _shortest_round_trip_ms(host: Host, other: Host) -> float:
    # The first packet also waits for the address of the other host.
    answer = host.run("ping", "-c", "6", "-i", "0.05", other.address)
    match = re.search(r"= ([\d.]+)/", answer)
    assert match is not None
    return float(match[1])


def test_ranks_know_their_site_and_the_rates_of_both_levels() -> None:
    script = "echo r=$RANK g=$GROUP_RANK a=$MASTER_ADDR s=$PACELINE_SITE/$PACELINE_NUM_SITES "
    script += "$PACELINE_MEASURED_LINK_RATE_BITS_PER_S $PACELINE_MEASURED_SITE_RATE_BITS_PER_S >&2"
    shape = ("--sites", "2", "--hosts", "2", "--rate", "50mbit", "--site-rate", "10mbit")
    result = _lab_run(*shape, "--ranks-per-host", "2", "--", "sh", "-c", script)
    assert result.returncode == 0, result.stderr
    said = sorted(line for line in result.stderr.splitlines() if " | " in line)
    rates = {line.partition("/2 ")[2] for line in said}
    assert [line.partition("/2 ")[0] for line in said] == [
        f"site {rank // 4} host {rank // 2} rank {rank} | "
        f"r={rank} g={rank // 2} a=10.77.0.1 s={rank // 4}"
        for rank in range(8)
    ]
    (inside, across), *others = [line.split() for line in rates]
    assert not others
    # Busy cores can slow a sender down, and a receiver that waited for one finds a full queue, as
    # if the link were faster; the slow test below measures until they do neither.
    assert 0.5 * 10e6 < float(across) < 1.5 * 10e6 < float(inside) < 1.5 * 50e6
    for text, rate in (("link bandwidth", inside), ("bandwidth between sites", across)):
        assert f"measured {text} {float(rate) / 1e6:.0f} Mbit/s" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.02], ids=["bridge", "relay"])
def test_a_shaped_uplink_carries_its_rate(delay_s: float) -> None:
    for rate in (100e6, 500e6):
        uplink = LinkShape(rate_bits_per_s=rate, delay_s=delay_s)
        with sites(2, 2, LinkShape(rate_bits_per_s=1e9), uplink) as (here, there):
            first, second = here.hosts
            # Busy cores can slow a sender down, but nothing makes it faster than the link.
            inside = [measure_link(second, first, 1e9) for _ in range(3)]
            across = [measure_link(there.hosts[0], first, rate, delay_s) for _ in range(5)]
        assert 0.85e9 < max(inside) < 1.02e9
        assert 0.85 * rate < max(across) < 1.02 * rate


_RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 15001)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
connection.recv(1)
began = time.monotonic()
while connection.recv(1 << 16):
    pass
print(began, time.monotonic())
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 15001)) as connection:
    print("connected", flush=True)
    sys.stdin.readline()
    connection.sendall(bytes(int(sys.argv[2])))
"""


def _rate_together(ways: list[tuple[Host, Host]], num_bytes: int) -> float:
    """Returns the rate of transfers that begin at once, from the first byte to the very last."""
    started = []

    def start(host: Host, *words: str) -> "subprocess.Popen[str]":
        command = [*host.prefix, sys.executable, "-c", *words]
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() in ("listening\n", "connected\n")
        return started[-1]

    try:
        receivers = [start(receiver, _RECEIVE, receiver.address) for _, receiver in ways]
        for sender in [start(host, _SEND, to.address, str(num_bytes)) for host, to in ways]:
            assert sender.stdin is not None
            sender.stdin.write("\n")
            sender.stdin.flush()
        times = [receiver.communicate(timeout=60)[0].split() for receiver in receivers]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    began, ended = zip(*times, strict=True)
    return 8 * num_bytes * len(ways) / (max(map(float, ended)) - min(map(float, began)))


def test_the_hosts_of_a_site_share_its_uplink_in_both_directions() -> None:
    rate = 40e6
    with sites(3, 2, uplink=LinkShape(rate_bits_per_s=rate)) as (here, *others):
        away = [site.hosts[0] for site in others]
        # Busy cores can make this slower, but only a line for each host makes it faster.
        for ways in (zip(away, here.hosts, strict=True), zip(here.hosts, away, strict=True)):
            assert _rate_together(list(ways), 3_000_000) < 1.02 * rate


@pytest.mark.parametrize(
    "delay_s",
    [pytest.param(0.0, id="bridge"), pytest.param(0.02, id="relay", marks=pytest.mark.slow)],
)
def test_a_cut_uplink_separates_sites_and_not_their_hosts(
    delay_s: float, tmp_path: pathlib.Path
) -> None:
    with sites(3, 2, uplink=LinkShape(delay_s=delay_s)) as made:
        (first, second), (third, fourth), (fifth, _sixth) = (site.hosts for site in made)
        run = TargetRun(directory=tmp_path, mark="none", sites=made, any_process=False)
        fault = Fault(number=1, kind="site-down", due_s=0.0, lasts_s=1.0, choice=0.5)
        round_trips_ms = [_shortest_round_trip_ms(first, other) for other in (second, third)]
        assert all(_reaches(first, other) for other in (fourth, fifth))
        with FAULTS["site-down"].inject(run, fault) as target:
            assert target == "site 1"
            assert _reaches(third, fourth)
            assert _reaches(first, second)
            assert _reaches(first, fifth)
            assert not _reaches(first, third)
        assert _reaches(first, third)
        assert _reaches(fifth, fourth)
    assert round_trips_ms[0] < 20
    assert 2e3 * delay_s <= round_trips_ms[1] < 2e3 * delay_s + 20


@pytest.mark.skipif(shutil.which("iptables") is None, reason="iptables drops the packets")
def test_only_what_crosses_an_uplink_is_lost_there() -> None:
    ping = ("ping", "-c", "150", "-i", "0.01", "-W", "1")
    lost = []
    with sites(2, 2, uplink=LinkShape(loss=0.2)) as (here, there):
        for other in (here.hosts[1], there.hosts[0]):
            match = re.search(r"([\d.]+)% packet loss", here.hosts[0].run(*ping, other.address))
            assert match is not None
            lost.append(float(match[1]))
    assert lost[0] == 0
    # Each direction loses a fifth, so 36% of pings; the bounds are four standard deviations of 150.
    assert 20 < lost[1] < 52


@pytest.mark.parametrize(
    "is_privileged",
    [pytest.param(True, id="root"), pytest.param(False, id="user", marks=pytest.mark.slow)],
)
def test_the_example_of_two_sites(is_privileged: bool) -> None:
    # Root of a user namespace may make networks, and is an ordinary user for the rest.
    as_user = () if is_privileged else ("unshare", "--map-root-user")
    if subprocess.run([*as_user, "true"], capture_output=True).returncode != 0:
        pytest.skip("this kernel allows ordinary users no user namespaces")
    command = [*as_user, sys.executable, EXAMPLES / "two_sites.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    said = dict(line.split(": ") for line in result.stdout.splitlines())
    assert list(said) == ["inside a site", "between sites", "cut", "up again"]
    assert said["cut"] == "no answer"
    inside, *across = (int(said.pop(key).removesuffix(" ms")) for key in list(said) if key != "cut")
    assert all(each >= 40 for each in across)
    if is_privileged:
        # Only root's relay never waits for a core.
        assert inside < 20
        assert all(each < 60 for each in across)


@pytest.mark.slow
def test_many_sites_reach_each_other() -> None:
    uplink = LinkShape(rate_bits_per_s=1e8, delay_s=0.01)
    with sites(125, 2, LinkShape(rate_bits_per_s=1e9), uplink) as made:
        first, last = made[0].hosts[0], made[-1].hosts[-1]
        assert (last.index, last.site, last.address) == (249, 124, "10.77.124.2")
        assert _reaches(last, first)


@pytest.mark.slow
def test_torchrun_on_every_host_of_two_sites() -> None:
    torchrun = (
        f"exec {BIN / 'torchrun'} --nnodes $WORLD_SIZE --nproc-per-node 1 --node-rank $RANK "
        f"--master-addr $MASTER_ADDR --master-port 29400 {EXAMPLES / 'all_reduce.py'}"
    )
    shape = ("--sites", "2", "--hosts", "2", "--rate", "1gbit", "--site-rate", "100mbit")
    result = _lab_run(*shape, "--site-delay", "5ms", "--", "sh", "-c", torchrun)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "4 ranks on 4 host(s): 10\n"


_STEPS = """
import os, pathlib, time
path = pathlib.Path("run/metrics.jsonl")
path.parent.mkdir(exist_ok=True)
done = len(path.read_text().splitlines()) if path.exists() else 0
for step in range(done + 1, 400):
    if os.environ["RANK"] == "0":
        with path.open("a") as file:
            print(f'{{"kind":"step","step":{step}}}', file=file)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_chaos_kills_and_cuts_sites(tmp_path: pathlib.Path) -> None:
    (tmp_path / "program.py").write_text(_STEPS)
    words = ["--run", "run", "--sites", "2", "--hosts", "1", "--for", "15s", "--every", "3s"]
    words += ["--site-kill", "--site-down", "0.5s"]
    words += ["--store", "chaos.jsonl", "--figure", "chaos.png"]
    result = subprocess.run(
        [str(BIN / "paceline"), "lab", "chaos", *words, "--", sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    said = re.findall(r"(site-\w+), site [01]", result.stderr)
    assert set(said) == {"site-kill", "site-down"}
    assert '"num_sites":2' in (tmp_path / "chaos.jsonl").read_text()
