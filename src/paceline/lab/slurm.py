"""A Slurm cluster of virtual nodes on this machine, in its own directory.

It has one controller and one daemon per virtual node, all on loopback ports that were free at
start, and a separate munge for authentication. All files, including a pid file per process, are in
the directory; stopping the cluster ends exactly those processes. Configuration and pid files are
read, and old state is deleted, only in a directory that this user made for that purpose. GPUs are
placeholder files that Slurm counts and allocates, without hardware.
"""

import contextlib
import dataclasses
import getpass
import os
import pathlib
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from typing import Literal

from paceline.core.errors import PacelineError

_DAEMONS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "munged": "munge",
    "sinfo": "slurm-client",
}
_MARKER = ".paceline-slurm"
"""File that says that everything in its directory is a cluster's."""
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.1


class SlurmError(PacelineError):
    """The local Slurm cannot be started, reached or stopped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmStatus:
    """State of the cluster in a directory."""

    state: Literal["running", "stopped"]
    directory: str
    configuration: str
    nodes: tuple[str, ...] = ()
    """Each node with its state, as printed by sinfo."""


def default_directory() -> pathlib.Path:
    """Returns the directory of this user's cluster, below one that other users cannot write to."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return pathlib.Path(runtime) / "paceline-slurm"
    try:
        state = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise SlurmError("this user has no home directory; name a --directory") from error
    return pathlib.Path(state) / "paceline-slurm"


def missing_packages() -> list[str]:
    """Returns the Debian packages that a local Slurm needs and that are not installed."""
    # Daemons live in sbin, which is not in an ordinary user's PATH.
    return sorted({package for tool, package in _DAEMONS.items() if _find(tool) is None})


def start_slurm(
    directory: pathlib.Path, *, num_nodes: int, cpus_per_node: int, gpus_per_node: int
) -> SlurmStatus:
    """Starts a cluster and waits until all its nodes are idle."""
    if packages := missing_packages():
        raise SlurmError(f"Slurm is not installed; install {' '.join(packages)}")
    directory = _whole(directory)
    _make_own(directory)
    if slurm_status(directory).state == "running":
        raise SlurmError(f"a cluster is running in {directory}; stop it first")
    # Clean up after a crashed controller: its daemons, and state that is no longer valid.
    stop_slurm(directory)
    shutil.rmtree(directory / "state", ignore_errors=True)
    for name in ("run", "state", "log"):
        (directory / name).mkdir(exist_ok=True)
    key = directory / "munge.key"
    key.unlink(missing_ok=True)
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    _write_configuration(directory, num_nodes, cpus_per_node, gpus_per_node)
    configuration = str(directory / "slurm.conf")
    try:
        munge_files = {
            "socket": "run/munge.socket",
            "key-file": key.name,
            "pid-file": "run/munged.pid",
            "log-file": "log/munged.log",
            "seed-file": "state/munge.seed",
        }
        options = [f"--{name}={directory}/{file}" for name, file in munge_files.items()]
        _start(["munged", "--force", *options], directory)
        _start(["slurmctld", "-f", configuration], directory)
        for index in range(num_nodes):
            _start(["slurmd", "-f", configuration, "-N", f"n{index + 1}"], directory)
        _wait_until_idle(directory, num_nodes)
    except BaseException:
        stop_slurm(directory)
        raise
    return slurm_status(directory)


def stop_slurm(directory: pathlib.Path) -> None:
    """Ends the cluster's jobs, and the processes whose pid files are in the directory."""
    directory = _whole(directory)
    if not _is_own(directory):
        return
    if slurm_status(directory).state == "running":
        # Slurm daemons leave jobs running on exit by design, so cancel them first.
        _client(directory, "scancel", f"--user={getpass.getuser()}")
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while _client(directory, "squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
    # Nodes first, so that the controller can still process their shutdown; munge last.
    run = directory / "run"
    for path in (*run.glob("slurmd-*.pid"), run / "slurmctld.pid", run / "munged.pid"):
        with contextlib.suppress(ValueError, ProcessLookupError, FileNotFoundError):
            pid = int(path.read_text())
            if _is_own_daemon(pid, directory):
                _end(pid, directory)
        path.unlink(missing_ok=True)


def slurm_status(directory: pathlib.Path) -> SlurmStatus:
    """Returns the state of the cluster in the directory, with its nodes."""
    directory = _whole(directory)
    configuration = str(directory / "slurm.conf")
    status = SlurmStatus(state="stopped", directory=str(directory), configuration=configuration)
    if not _is_own(directory):
        return status
    with contextlib.suppress(FileNotFoundError, ValueError):
        pid = int((directory / "run" / "slurmctld.pid").read_text())
        if _is_own_daemon(pid, directory):
            return dataclasses.replace(status, state="running", nodes=_sinfo(directory))
    return status


def _write_configuration(
    directory: pathlib.Path, num_nodes: int, cpus_per_node: int, gpus_per_node: int
) -> None:
    controller_port, *node_ports = _free_ports(num_nodes + 1)
    gres = f" Gres=gpu:{gpus_per_node}" if gpus_per_node else ""
    lines = [
        "ClusterName=paceline",
        "SlurmctldHost=localhost(127.0.0.1)",
        f"SlurmctldPort={controller_port}",
        f"SlurmUser={getpass.getuser()}",
        f"SlurmdUser={getpass.getuser()}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={directory}/run/munge.socket",
        f"StateSaveLocation={directory}/state",
        f"SlurmdSpoolDir={directory}/state/%n",
        f"SlurmctldPidFile={directory}/run/slurmctld.pid",
        f"SlurmdPidFile={directory}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdLogFile={directory}/log/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "ReturnToService=2",
        # Allow more CPUs than the machine has, so that several ranks can be placed.
        "SlurmdParameters=config_overrides",
        # Bind to loopback instead of all addresses.
        "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "InactiveLimit=0",
        *(["GresTypes=gpu"] if gpus_per_node else []),
    ]
    for index, port in enumerate(node_ports):
        lines.append(
            f"NodeName=n{index + 1} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
            f"Port={port} CPUs={cpus_per_node} RealMemory=2000{gres} State=UNKNOWN"
        )
    lines.append(f"PartitionName=local Nodes=n[1-{num_nodes}] Default=YES MaxTime=60 State=UP")
    (directory / "slurm.conf").write_text("\n".join(lines) + "\n")
    gres_lines = []
    if gpus_per_node:
        devices = f"/dev/tty[0-{gpus_per_node - 1}]" if gpus_per_node > 1 else "/dev/tty0"
        gres_lines = [f"NodeName=n[1-{num_nodes}] Name=gpu File={devices}"]
    (directory / "gres.conf").write_text("\n".join(gres_lines) + "\n")


def _start(command: list[str], directory: pathlib.Path) -> None:
    program = _find(command[0])
    assert program is not None
    # Daemons move to the background but keep inherited file descriptors, so pass them none.
    result = subprocess.run(
        [program, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        cwd=directory,
    )
    if result.returncode != 0:
        complaint = result.stderr.strip() or f"see {directory / 'log'}"
        raise SlurmError(f"{command[0]} did not start: {complaint}")


def _wait_until_idle(directory: pathlib.Path, num_nodes: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    nodes: tuple[str, ...] = ()
    while time.monotonic() < deadline:
        nodes = _sinfo(directory)
        if sum(node.endswith(" idle") for node in nodes) == num_nodes:
            return
        time.sleep(_POLL_INTERVAL_S)
    raise SlurmError(
        f"the nodes are not idle after {_START_TIMEOUT_S:.0f} s ({', '.join(nodes)}); "
        f"see {directory / 'log'}"
    )


def _sinfo(directory: pathlib.Path) -> tuple[str, ...]:
    return tuple(_client(directory, "sinfo", "--noheader", "--Node", "--format=%N %T").splitlines())


def _client(directory: pathlib.Path, *command: str) -> str:
    """Runs a Slurm client command against this cluster and returns its output."""
    environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=30
    ).stdout


def _whole(directory: pathlib.Path) -> pathlib.Path:
    """Returns the absolute path, without following the directory itself if it is a link."""
    return directory.parent.resolve() / directory.name


def _make_own(directory: pathlib.Path) -> None:
    """Creates the directory with access for this user only, unless it is a cluster's already."""
    if _is_own(directory):
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Whatever lies here is not ours to delete, and may be somebody else's to replace.
    if any(directory.iterdir()):
        raise SlurmError(f"{directory} has other files; name a new or empty --directory")
    directory.chmod(0o700)
    (directory / _MARKER).touch(mode=0o600)


def _is_own(directory: pathlib.Path) -> bool:
    """Returns whether a cluster's directory is there; raises if it is not this user's alone."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    if status.st_uid != os.geteuid():
        raise SlurmError(f"{directory} belongs to another user; choose another --directory")
    if not stat.S_ISDIR(status.st_mode):
        raise SlurmError(f"{directory} is a link or a file; choose another --directory")
    if not (directory / _MARKER).exists():
        return False
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SlurmError(f"other users can write to {directory}; choose another --directory")
    return True


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _is_own_daemon(pid: int, directory: pathlib.Path) -> bool:
    """Returns whether a process is a daemon of this cluster; a stale pid file may name another.

    Every daemon has a path inside the directory on its command line. A zombie has an empty command
    line.
    """
    with contextlib.suppress(OSError):
        return str(directory).encode() in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _end(pid: int, directory: pathlib.Path) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while _is_own_daemon(pid, directory):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_INTERVAL_S)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports
