"""One instance per model store and per socket: kernel locks that vanish with their holder, whatever ended it.

The store's folder itself is locked (flock on a read-only descriptor), so nothing is written where the model lies and a
read-only mount is no obstacle. The socket has a small lock file beside it. `/proc/locks` names the holder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType

from sluice.io.errors import InstanceHeld, PresetError


def holder_pid(device: int, inode: int, locks: str) -> int | None:
    """Who holds the flock on a file, from the text of /proc/locks; None when it does not say.

    Some file systems (btrfs, overlay) show another device number there than stat does; then the inode alone decides.
    """
    nearly: int | None = None
    for line in locks.splitlines():
        fields = line.split()
        # "1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF"; a waiting one has "->" in second place.
        if len(fields) < 6 or fields[1] != "FLOCK":
            continue
        major, _, rest = fields[5].partition(":")
        minor, _, number = rest.partition(":")
        if number != str(inode) or not fields[4].isdigit():
            continue
        with contextlib.suppress(ValueError):
            if (int(major, 16), int(minor, 16)) == (os.major(device), os.minor(device)):
                return int(fields[4])
        nearly = int(fields[4])
    return nearly


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"


class InstanceLock:
    """A held lock. A context manager; closing twice is harmless, and so is dying: the kernel lets go."""

    def __init__(self, fd: int, what: str) -> None:
        self._fd: int | None = fd
        self.what = what

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> InstanceLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(fd: int, what: str) -> InstanceLock:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        info = os.fstat(fd)
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise PresetError(f"{what}: cannot be locked: {error.strerror}") from None
        try:
            pid = holder_pid(info.st_dev, info.st_ino, Path("/proc/locks").read_text(encoding="ascii"))
        except OSError:
            pid = None
        who = f"pid {pid} ({_name_of(pid)})" if pid else "another process"
        raise InstanceHeld(f"{what}: held by {who}; stop it first, or serve another model on another socket") from None
    return InstanceLock(fd, what)


def lock_store(model: Path) -> InstanceLock:
    """Locks the model folder (or file). Raises InstanceHeld naming the holder's pid, PresetError where it cannot be."""
    try:
        fd = os.open(model, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PresetError(f"model.path: {model}: {error.strerror}") from None
    return _lock(fd, f"model {model}")


def lock_socket(path: Path) -> InstanceLock:
    """Locks the socket's path by the file `path`.lock, which stays (removing it would let two processes hold two
    locks of one name). Raises InstanceHeld naming the holder's pid, PresetError where the folder is not writable."""
    beside = path.with_name(path.name + ".lock")
    try:
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise PresetError(f"server.socket: {beside}: cannot be made: {error.strerror}") from None
    return _lock(fd, f"socket {path}")
