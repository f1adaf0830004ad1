"""Starts one example script with every launcher, and checks that no process is left behind."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from paceline.core.units import MB
from paceline.lab import LinkShape, hosts
from paceline.lab.network import LabError
from paceline.lab.slurm import missing_packages, slurm_status, start_slurm, stop_slurm

pytestmark = pytest.mark.host("how ranks find each other")

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "all_reduce.py")
PYTHON = sys.executable
BIN = pathlib.Path(sys.executable).parent


def _lab_is_possible() -> str | None:
    try:
        with hosts(1):
            return None
    except LabError as error:
        return str(error)


LAB_MISSING = _lab_is_possible()
needs_lab = pytest.mark.skipif(LAB_MISSING is not None, reason=str(LAB_MISSING))
needs_slurm = pytest.mark.skipif(
    bool(missing_packages()), reason=f"not installed: {' '.join(missing_packages())}"
)


def _run(
    *command: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=clean | (environment or {})
    )


def _running(command: list[str]) -> list[str]:
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes().decode().split("\0")[:-1]
            if arguments == command:
                found.append(process.name)
    return found


def _network_namespaces() -> set[str]:
    found = set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.add(str((process / "ns" / "net").readlink()))
    return found


def _descendants(marker: str) -> list[str]:
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if marker in command and process.name != str(os.getpid()):
            found.append(command)
    return found


def _nothing_is_left(marker: str = EXAMPLE) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not _descendants(marker):
            return True
        time.sleep(0.1)
    return False


def test_alone() -> None:
    result = _run(PYTHON, EXAMPLE)
    assert result.stdout == "1 ranks on 1 host(s): 1\n", result.stderr


def test_a_plain_script_starts_copies_of_itself() -> None:
    result = _run(PYTHON, EXAMPLE, "--ranks", "3")
    assert result.stdout == "3 ranks on 1 host(s): 6\n", result.stderr
    failed = _run(PYTHON, EXAMPLE, "--ranks", "2", "--fail-on-rank", "1")
    assert failed.returncode == 3
    assert "rank 1 failed with exit code 3" in failed.stderr
    assert _nothing_is_left()


def test_torchrun() -> None:
    torchrun = str(BIN / "torchrun")
    result = _run(torchrun, "--nproc-per-node", "2", "--standalone", EXAMPLE)
    assert result.stdout == "2 ranks on 1 host(s): 3\n", result.stderr
    failed = _run(torchrun, "--nproc-per-node", "2", "--standalone", EXAMPLE, "--fail-on-rank", "1")
    assert failed.returncode == 1
    assert "exitcode  : 3" in failed.stderr
    assert _nothing_is_left()


@needs_lab
@pytest.mark.parametrize(
    ("num_hosts", "ranks_per_host"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
        (2, 2),
    ],
)
def test_the_lab(num_hosts: int, ranks_per_host: int) -> None:
    lab = [str(BIN / "paceline"), "lab", "run", "--rate", "1gbit"]
    lab += ["--hosts", str(num_hosts), "--ranks-per-host", str(ranks_per_host), "--", PYTHON]
    result = _run(*lab, EXAMPLE)
    world_size = num_hosts * ranks_per_host
    total = world_size * (world_size + 1) // 2
    assert result.stdout == f"{world_size} ranks on {num_hosts} host(s): {total}\n", result.stderr
    assert "measured link bandwidth" in result.stderr


@pytest.mark.slow
@needs_lab
def test_the_lab_passes_exit_codes_and_names_the_rank() -> None:
    lab = [str(BIN / "paceline"), "lab", "run", "--", PYTHON, EXAMPLE]
    failed = _run(*lab, "--fail-on-rank", "1")
    assert failed.returncode == 3
    assert "host 1 rank 1 failed with exit code 3" in failed.stderr
    assert _nothing_is_left()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    directory = tmp_path_factory.mktemp("slurm")
    status = start_slurm(directory, num_nodes=2, cpus_per_node=4, gpus_per_node=2)
    assert status.nodes == ("n1 idle", "n2 idle")
    yield {"SLURM_CONF": status.configuration}
    stop_slurm(directory)
    assert slurm_status(directory).state == "stopped"
    assert _nothing_is_left(str(directory))


@pytest.mark.slow
@needs_slurm
@pytest.mark.parametrize(
    ("options", "world_size", "num_hosts"),
    [
        pytest.param(["-N", "1", "-n", "2"], 2, 1, marks=pytest.mark.slow),
        pytest.param(["-N", "2", "--ntasks-per-node", "2"], 4, 2, marks=pytest.mark.slow),
        # One task per node sees two GPUs and starts a rank for each.
        pytest.param(["-N", "1", "-n", "1", "--gpus-per-node", "2"], 2, 1, marks=pytest.mark.slow),
        (["-N", "2", "-n", "2", "--gpus-per-node", "2"], 4, 2),
    ],
)
def test_slurm(slurm: dict[str, str], options: list[str], world_size: int, num_hosts: int) -> None:
    result = _run("srun", *options, PYTHON, EXAMPLE, environment=slurm)
    total = world_size * (world_size + 1) // 2
    assert result.stdout == f"{world_size} ranks on {num_hosts} host(s): {total}\n", result.stderr


@needs_slurm
@pytest.mark.parametrize(
    "options",
    [["-n", "2"], pytest.param(["-n", "1", "--gpus-per-node", "2"], marks=pytest.mark.slow)],
)
def test_slurm_passes_exit_codes(slurm: dict[str, str], options: list[str]) -> None:
    failed = _run(
        "srun", "-N", "1", *options, PYTHON, EXAMPLE, "--fail-on-rank", "1", environment=slurm
    )
    assert failed.returncode == 3, failed.stderr
    assert _nothing_is_left()


@pytest.mark.slow
def test_ranks_die_with_a_killed_script() -> None:
    code = (
        "import os, time\n"
        "from paceline.parallel import distributed_session\n"
        "with distributed_session(ranks_per_host=2):\n"
        "    os.write(1, b'ready\\n')\n"
        "    time.sleep(120)  # marker-of-a-killed-script\n"
    )
    parent = subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert _nothing_is_left("marker-of-a-killed-script")


LISTENING = """
import os, pathlib, sys
from paceline.parallel import distributed_session
import torch, torch.distributed as dist

def listeners():
    inodes = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found

with distributed_session(ranks_per_host=2) as session:
    dist.all_reduce(torch.ones(1000))
    for address in listeners():
        # In one call, so that the lines of two ranks cannot mix.
        os.write(1, f"{address}\\n".encode())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_listens_beyond_loopback(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "listening.py"
    script.write_text(LISTENING)
    result = _run(PYTHON, str(script))
    assert result.returncode == 0, result.stderr
    addresses = set(result.stdout.split())
    assert addresses <= {"0100007F", "00000000000000000000000001000000"}
    assert addresses, "gloo listens somewhere; the test must see it"


OPEN = """
import os, pathlib, sys
from paceline.parallel import distributed_session

with distributed_session(ranks_per_host=2) as session:
    own = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:
            pass
    lines = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    sockets = [line.split()[9] for line in lines if line.split()[3] == "0A"]
    os.write(1, (" ".join(each for each in sockets if f"socket:[{each}]" in own) + "\\n").encode())
    sys.stdin.read()
"""


@pytest.mark.parametrize("is_private", [True, False], ids=["private", "shared"])
def test_other_users_do_not_reach_ranks_in_a_network_namespace(
    is_private: bool, tmp_path: pathlib.Path
) -> None:
    """The page on starting ranks has this command."""
    namespace = ("unshare", "--map-root-user", "--net", "sh", "-c")
    if is_private and subprocess.run([*namespace, "ip link set lo up"]).returncode != 0:
        pytest.skip("this kernel allows ordinary users no user namespaces")
    script = tmp_path / "open.py"
    script.write_text(OPEN)
    words = [PYTHON, str(script)]
    if is_private:
        words = [*namespace, f"ip link set lo up && exec {PYTHON} {script}"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        sockets = {each for _rank in range(2) for each in running.stdout.readline().split()}
        assert sockets
        reached = pathlib.Path("/proc/net/tcp").read_text().split()
        assert sockets.isdisjoint(reached) == is_private
        running.communicate("")


@pytest.mark.slow
@needs_lab
def test_a_shaped_link_carries_its_rate() -> None:
    from paceline.lab.bandwidth import measure_link

    for rate in (200e6, 1e9):
        with hosts(2, LinkShape(rate_bits_per_s=rate)) as (first, second):
            # Busy cores can slow a sender down, but nothing makes it faster than the link.
            measured = [measure_link(second, first, rate) for _ in range(5)]
        assert 0.85 * rate < max(measured) < 1.02 * rate


@needs_lab
@pytest.mark.skipif(shutil.which("iptables") is None, reason="iptables drops the packets")
def test_a_lossy_link_loses_packets() -> None:
    with hosts(2, LinkShape(loss=0.2)) as (first, second):
        answered = first.run("ping", "-c", "150", "-i", "0.01", "-W", "1", second.address)
    match = re.search(r"([\d.]+)% packet loss", answered)
    assert match is not None
    # Each direction loses a fifth, so 36% of pings; the bounds are four standard deviations of 150.
    assert 20 < float(match[1]) < 52


@needs_lab
def test_virtual_hosts_have_no_way_out() -> None:
    """An address outside is refused at once, because no route leads there."""
    with hosts(2, LinkShape()) as (first, second):
        routes = first.run("ip", "route").splitlines()
        assert routes
        assert not [line for line in routes if line.startswith("default")]
        assert " 0% packet loss" in first.run("ping", "-c", "1", second.address)
        with pytest.raises(LabError, match="unreachable"):
            first.run("ping", "-c", "1", "-W", "1", "192.0.2.1")


@needs_lab
@pytest.mark.parametrize(
    "shape", [["--hosts", "2"], ["--sites", "2", "--hosts", "1", "--site-delay", "1ms"]]
)
def test_a_lab_killed_by_force_leaves_nothing(shape: list[str]) -> None:
    # The shell forks `sleep`, so killing only the rank would not end it.
    command = [str(BIN / "paceline"), "lab", "run", *shape, "--"]
    command += ["sh", "-c", "sleep 98765; true"]
    before = _network_namespaces()
    lab = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert lab.stderr is not None
    assert lab.stderr.readline().startswith("paceline lab: measured ")
    deadline = time.monotonic() + 20
    while len(_running(["sleep", "98765"])) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_running(["sleep", "98765"])) == 2
    assert len(_network_namespaces() - before) == 3
    os.kill(lab.pid, signal.SIGKILL)
    lab.wait()
    lab.stderr.close()
    deadline = time.monotonic() + 20
    while (_running(["sleep", "98765"]) or _network_namespaces() - before) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not _running(["sleep", "98765"])
    assert not _network_namespaces() - before


@needs_lab
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes an ordinary user, so needs root")
def test_an_ordinary_user_has_a_lab_too() -> None:
    code = (
        "import os\n"
        "from paceline.lab import LinkShape, sites\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "link = LinkShape(rate_bits_per_s=1e8)\n"
        "with sites(2, 1, link, link) as (here, there):\n"
        "    (host,), (other,) = here.hosts, there.hosts\n"
        "    print(host.run('ping', '-c', '1', '-W', '2', other.address) != '')\n"
    )
    probe = subprocess.run(
        ["setpriv", "--reuid", "65534", "--clear-groups", "unshare", "-Urn", "true"],
        capture_output=True,
    )
    if probe.returncode != 0:
        pytest.skip("this kernel allows ordinary users no user namespaces")
    result = _run(PYTHON, "-c", code)
    assert result.stdout == "True\n", result.stderr


@needs_lab
def test_a_delay_needs_netem_or_is_refused_by_name() -> None:
    result = _run(str(BIN / "paceline"), "lab", "run", "--delay", "5ms", "--", "echo", "reached")
    if result.returncode == 0:
        with hosts(2, LinkShape(delay_s=0.005)) as (first, second):
            answer = first.run("ping", "-c", "3", "-i", "0.2", second.address)
        match = re.search(r"= [\d.]+/([\d.]+)/", answer)
        assert match is not None
        assert 9.5 < float(match[1]) < 30
    else:
        assert "--delay needs netem" in result.stderr
        assert "Traceback" not in result.stderr


LINK_DOWN = """
import sys, time
import torch
from paceline.benchmarks.collectives import Collective
from paceline.parallel import distributed_session

with distributed_session(timeout_s=8) as session:
    collective = Collective("all_reduce", {size}, torch.device("cpu"))
    collective.run()
    print("running", flush=True, file=sys.stderr)
    while True:
        collective.run()
"""


@pytest.mark.slow
@needs_lab
def test_a_pulled_cable_ends_every_rank_in_time(tmp_path: pathlib.Path) -> None:
    from paceline.lab.network import INTERFACE
    from paceline.lab.run import rank_environment

    script = tmp_path / "link_down.py"
    script.write_text(LINK_DOWN.replace("{size}", str(20 * MB)))
    with hosts(2, LinkShape(rate_bits_per_s=2e8)) as made:
        ranks = [
            subprocess.Popen(
                made[rank].command([PYTHON, str(script)]),
                env=os.environ | rank_environment(made, rank, ranks_per_host=1),
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for process in ranks:
            assert process.stderr is not None
            while process.stderr.readline() != "running\n":
                assert process.poll() is None
        time.sleep(0.5)
        made[1].run("ip", "link", "set", INTERFACE, "down")
        pulled = time.monotonic()
        for rank, process in enumerate(ranks):
            _, error = process.communicate(timeout=60)
            assert process.returncode != 0
            assert f"rank {rank}: all_reduce of 20 MB failed" in error
        assert time.monotonic() - pulled < 8 + 30


_TRAINS = """
import os, sys, torch
from torch import nn
from paceline.parallel import NaiveDataParallel, distributed_session

with distributed_session(ranks_per_host=2):
    model = NaiveDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
sys.exit(len(os.listdir("/proc/self/task")) - 1)
"""


@pytest.mark.slow
def test_a_session_that_is_over_leaves_no_threads(tmp_path: pathlib.Path) -> None:
    # A gloo thread that is alive at interpreter exit sometimes aborts the process.
    script = tmp_path / "trains.py"
    script.write_text(_TRAINS)
    result = _run(PYTHON, str(script))
    assert result.returncode == 0, result.stderr


_LEAVES_IN_FLIGHT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from paceline.parallel import ShardedDataParallel, ShardedOptimizer, distributed_session

def train(rank):
    model = ShardedDataParallel(nn.Linear(1500, 1500))
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(1500)).sum().backward()
    time.sleep(rank)  # The other rank ends its program meanwhile.
    optimizer.step()

if sys.argv[1] == "own group":
    rank = int(os.environ["RANK"])
    store = dist.FileStore(os.environ["STORE"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    train(rank)
else:
    with distributed_session(ranks_per_host=2, timeout_s=30) as session:
        train(session.rank)
        if sys.argv[1] == "error":
            raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "exit_code"), [pytest.param("session", 0, marks=pytest.mark.slow), ("error", 3)]
)
def test_a_script_ends_while_parameters_are_in_flight(
    tmp_path: pathlib.Path, end: str, exit_code: int
) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(_LEAVES_IN_FLIGHT)
    result = _run(PYTHON, str(script), end)
    assert result.returncode == exit_code, result.stderr


@pytest.mark.slow
def test_a_script_with_its_own_group_ends_while_parameters_are_in_flight(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(_LEAVES_IN_FLIGHT)
    shared = {"STORE": str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [PYTHON, str(script), "own group"], env=os.environ | shared | {"RANK": str(rank)}
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
