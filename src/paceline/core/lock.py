"""One owner per directory: a run, a sweep, a loop or a dataset is written by one command at a time.

The owner holds a kernel lock (flock) on a file inside the directory, which also says who it is.
The kernel releases the lock when the owner ends, however it ends. Children that `start_child`
starts, and forked ones, inherit the lock: they write to the directory too, so that it is free only
when the last of them has ended.

Where several hosts share a directory, the kernel of one may not know the locks of another, and a
few file systems have none. There the owner also changes the file every few seconds. Another host
that sees it change knows that the owner is alive, and takes the directory when it has not changed
for `LEASE_S`. Clocks are not compared.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import secrets
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from paceline.core.errors import UsageError

LOCK = ".paceline-lock"
"""Name of the file inside an owned directory. It stays when the owner has ended."""
INHERITED = "PACELINE_LOCKS"
"""Environment variable with the file descriptors of the locks that a child inherits."""
BEAT_S = 5.0
"""Time between two changes of the file on a file system that other hosts may share."""
LEASE_S = 30.0
"""Time without a change after which the owner on another host counts as ended."""
_ENDING_S = 10.0
"""Longest time that the children of a killed owner take to end."""
_CLAIM_S = 1.0
"""Time after which of two claims, made at the same moment by two hosts, one has overwritten the
other."""
_FIELDS = frozenset(("command", "pid", "host", "since", "kernel", "token"))
_LONGEST = 4096
"""Bytes of a lock file that are read."""
_POLL_S, _WAITING_POLL_S = 0.05, 1.0
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_LOCAL_FILE_SYSTEMS = frozenset(
    ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)
"""File systems of one kernel, whose locks are known to every process that can see the files."""
_MOUNT = re.compile(r"\S+ \S+ \S+ \S+ (?P<point>\S+) .*? - (?P<kind>\S+) ")

_held: dict[tuple[int, int], int] = {}
"""File descriptors of the locks of this process and its ancestors, by device and inode."""


class InUseError(UsageError):
    """Another command is writing to the directory."""


class Owner:
    """The process that wrote a lock file: where it runs, since when, and what it does."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def of_this_process(cls, command: str) -> "Owner":
        """Returns this process as an owner, with a token that no other owner has."""
        return cls(
            {
                "command": command,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                "kernel": _kernel(),
                "process_start": _process_start(os.getpid()),
                "token": secrets.token_hex(8),
                "beat": 0,
            }
        )

    @classmethod
    def read(cls, descriptor: int) -> "Owner | None":
        """Returns the owner that a lock file names; None if it names none."""
        try:
            fields = json.loads(_content(descriptor))
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or not fields.keys() >= _FIELDS:
            return None
        return cls(fields) if isinstance(fields["pid"], int) else None

    def write(self, descriptor: int) -> None:
        """Names this owner in a lock file."""
        content = json.dumps(self._fields).encode() + b"\n"
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))

    def beat(self, descriptor: int) -> bool:
        """Changes the lock file; returns whether it still named this owner."""
        found = Owner.read(descriptor)
        if found is None or found._fields["token"] != self._fields["token"]:
            return False
        self._fields["beat"] += 1
        self.write(descriptor)
        os.fsync(descriptor)  # Network file systems send what is written when they are asked to.
        return True

    def is_of_this_kernel(self) -> bool:
        """Returns whether process ids and locks of the owner mean the same to this process."""
        return bool(self._fields["kernel"] == _kernel())

    def is_running(self) -> bool:
        """Returns whether the process lives; only for an owner of this kernel."""
        start = _process_start(self._fields["pid"])
        return start is not None and start == self._fields.get("process_start")

    def has_same_beat(self, other: "Owner | None") -> bool:
        """Returns whether nothing has changed since `other` was read."""
        return other is not None and self._fields == other._fields

    def __str__(self) -> str:
        fields = self._fields
        where = f"process {fields['pid']} on {fields['host']}"
        return f"{fields['command']}, {where} since {fields['since']}"


@contextlib.contextmanager
def owned(
    directory: str | os.PathLike[str], command: str, *, longest_wait_s: float = 0.0
) -> Iterator[None]:
    """Owns a directory, which is created if it does not exist, while the context is open.

    A process that owns it already, or inherited the lock, goes on at once.

    Args:
        directory: The directory that this process will write to.
        command: What the process does, as the error of a second command names it.
        longest_wait_s: Time to wait for another command to end.

    Raises:
        InUseError: Another command owns the directory.
    """
    directory = pathlib.Path(directory)
    descriptor = _open(directory)
    status = os.fstat(descriptor)
    key = status.st_dev, status.st_ino
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        if key not in _held and key not in _inherited():
            owner, has_lease = _wait_and_take(descriptor, directory, command, longest_wait_s)
            _held[key] = descriptor
            stack.callback(_release, key, os.getpid())
            if has_lease:
                stack.enter_context(_beating(descriptor, directory, owner))
        yield


def held_locks() -> list[int]:
    """Returns the file descriptors that a child has to inherit, to own what this process owns."""
    return [*_held.values(), *_inherited().values()]


def _release(key: tuple[int, int], pid: int) -> None:
    """Ends the ownership, also for children that inherited it; forked children do not end it."""
    descriptor = _held.pop(key)
    if os.getpid() == pid:
        os.ftruncate(descriptor, 0)  # Another host need not wait for the lease to end.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _inherited() -> dict[tuple[int, int], int]:
    """Returns the locks that the parent passed on, by device and inode of their files."""
    found = {}
    for word in os.environ.get(INHERITED, "").split(","):
        with contextlib.suppress(ValueError, OSError):
            status = os.fstat(int(word))
            # A number may have come to mean another file in a process between parent and child.
            if stat.S_ISREG(status.st_mode):
                found[status.st_dev, status.st_ino] = int(word)
    return found


def _open(directory: pathlib.Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Whoever can open the file can lock it. Other users must not be able to.
        mode = 0o660 if directory.stat().st_mode & stat.S_IWGRP else 0o600
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(directory / LOCK, flags, mode)
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, mode)  # Not what the umask makes of it.
        return descriptor
    except (NotADirectoryError, FileExistsError) as error:
        raise UsageError(f"{directory} is a file; name a directory") from error
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be written to: {error.strerror}; name another directory, or ask "
            "its owner"
        ) from error


def _wait_and_take(
    descriptor: int, directory: pathlib.Path, command: str, longest_wait_s: float
) -> tuple[Owner, bool]:
    deadline = time.monotonic() + longest_wait_s
    while True:
        try:
            return _take(descriptor, directory, Owner.of_this_process(command))
        except InUseError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_WAITING_POLL_S)


def _take(descriptor: int, directory: pathlib.Path, this: Owner) -> tuple[Owner, bool]:
    """Makes this process the owner, or raises an `InUseError`; returns whether it has a lease."""
    began = changed = time.monotonic()
    is_shared = not _is_local(directory)
    seen: Owner | None = None
    while True:
        is_locked = _lock(descriptor)
        found = Owner.read(descriptor)
        if is_locked is False:
            # An owner on another kernel holds a lock that both kernels know, and lives.
            if found is not None and (not found.is_of_this_kernel() or found.is_running()):
                raise _in_use(directory, found)
            # The children of a killed owner are ending.
            if time.monotonic() - began > _ENDING_S:
                raise _in_use(directory, found)
        elif found is None:
            break
        elif found.is_of_this_kernel():
            if is_locked or not found.is_running():
                break
            raise _in_use(directory, found)
        elif is_locked and not is_shared:
            break  # The directory was copied, or the host was started again.
        elif not found.has_same_beat(seen):
            if seen is not None:
                raise _in_use(directory, found)
            seen, changed = found, time.monotonic()
        elif time.monotonic() - changed > LEASE_S:
            break
        time.sleep(_POLL_S)
    if is_locked is None:
        is_shared = True
        sys.stderr.write(
            f"paceline: {directory}: this file system has no locks; other commands notice this one "
            f"by a file that changes every {BEAT_S:g} s\n"
        )
    this.write(descriptor)
    if is_shared:
        time.sleep(_CLAIM_S)
        if not this.beat(descriptor):
            raise _in_use(directory, Owner.read(descriptor))
    return this, is_shared


def lock_file(descriptor: int, operation: int) -> bool:
    """Applies an operation of flock; returns False if the file system has no locks."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _lock(descriptor: int) -> bool | None:
    """Returns whether the lock is ours; None if the file system has no locks."""
    try:
        return lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) or None
    except BlockingIOError:
        return False


def _content(descriptor: int) -> bytes:
    """Returns the content of a lock file, which is opened again to read it.

    For as long as a file is open, a network file system may answer from memory. It asks what other
    hosts have written when a file is opened.
    """
    try:
        reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # Not Linux, or another host has deleted the file.
        return os.pread(descriptor, _LONGEST, 0)
    try:
        return os.pread(reopened, _LONGEST, 0)
    finally:
        os.close(reopened)


def _in_use(directory: pathlib.Path, owner: Owner | None) -> InUseError:
    who = "another process" if owner is None else str(owner)
    return InUseError(f"{directory} is in use ({who}); wait until it ends, or stop it")


@contextlib.contextmanager
def _beating(descriptor: int, directory: pathlib.Path, owner: Owner) -> Iterator[None]:
    """Changes the lock file regularly; ends the process if another host has taken the directory."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            # While the file system is away, nobody can tell who owns the directory.
            with contextlib.suppress(OSError):
                if not owner.beat(descriptor):
                    break
        else:
            return
        os.write(2, f"paceline: error: {directory} was taken by another host\n".encode())
        os._exit(InUseError.exit_code)

    thread = threading.Thread(target=beat, name="directory-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _is_local(directory: pathlib.Path) -> bool:
    """Returns whether only processes of this kernel can see a directory."""
    try:
        mounts = pathlib.Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    except OSError:  # Not Linux.
        return True
    path = os.fspath(directory.resolve())
    longest, kind = "", ""
    for mount in map(_MOUNT.match, mounts.splitlines()):
        # Later mounts hide earlier ones at the same point.
        if (
            mount is not None
            and _is_below(path, mount["point"])
            and len(mount["point"]) >= len(longest)
        ):
            longest, kind = mount["point"], mount["kind"]
    return kind in _LOCAL_FILE_SYSTEMS


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _kernel() -> str:
    """Identifies the boot of a host, and the group of processes that share process ids."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {pathlib.Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> str | None:
    """Returns when a process began, in ticks of the kernel; None if it has ended."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError:  # Not Linux, or not ours to see: it may live.
        return ""
    fields = status.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
