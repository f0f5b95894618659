"""What a reader is: the one seam below which bytes are moved, and the choice of one.

A reader makes single transfers and reports how each ended; resuming, retrying, ordering and accounting lie
above (schedule.py), so that io_uring, threads and the scripted fake of the tests share them. All methods run
on the I/O loop's thread. Files are opened here too, directly (O_DIRECT) where a real transfer shows it works.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sluice.io.errors import PresetError, StorageError

UNSUPPORTED = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOMEM, errno.EINVAL, errno.EOPNOTSUPP})
"""What kernels, containers and file systems answer where io_uring or O_DIRECT is not to be had."""


class Transfer:
    """One transfer: read into `buffer` from byte `offset` of descriptor `fd`, then call `done(result)` on the
    loop's thread. result: bytes moved (0 at end of file), or a negative errno. The buffer belongs to the kernel
    until then."""

    __slots__ = ("buffer", "done", "fd", "offset")

    def __init__(self, fd: int, offset: int, buffer: memoryview, done: Callable[[int], None]) -> None:
        self.fd, self.offset, self.buffer, self.done = fd, offset, buffer, done


class Reader(Protocol):
    """Moves bytes. At most `capacity` transfers at a time."""

    name: str

    def start(self, transfer: Transfer) -> None:
        """Take one transfer in; it may wait for `flush`."""

    def flush(self) -> None:
        """Hand everything that was taken in to the kernel."""

    def close(self) -> None:
        """Wait (briefly) for what is in flight and give descriptors and threads back."""


class OpenFile:
    """One file being read. direct: whether its descriptor bypasses the page cache. Closing twice is harmless."""

    def __init__(self, path: Path, drive: int, drive_name: str, direct: bool) -> None:
        self.path, self.drive, self.drive_name = path, drive, drive_name
        self.direct = direct
        self.verified: set[int] = set()  # pages at which records begin whose checksum was right
        self.fd = -1
        if direct:
            try:
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise self._unreadable(error) from error
                self.direct = False
        if self.fd < 0:
            self._open_buffered()

    def _open_buffered(self) -> None:
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        with contextlib.suppress(OSError):
            # Whole records are asked for; the kernel's own read-ahead would read what nobody wants.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def _unreadable(self, error: OSError) -> StorageError:
        return StorageError(f"cannot open: {error.strerror}", drive=self.drive_name, file=str(self.path))

    def make_buffered(self) -> None:
        """From now on through the page cache: the file system has refused a direct transfer."""
        old, self.direct = self.fd, False
        self._open_buffered()
        os.close(old)

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def why_no_uring(code: int) -> str:
    """A person's explanation of why io_uring_setup failed with errno `code`."""

    def read(path: str) -> str:
        try:
            return Path(path).read_text()
        except OSError:
            return ""

    word = errno.errorcode.get(code, str(code))
    disabled = read("/proc/sys/kernel/io_uring_disabled").strip()
    if code == errno.EPERM and disabled in ("1", "2"):
        return f"{word}: sysctl kernel.io_uring_disabled is {disabled}"
    if code in (errno.EPERM, errno.ENOSYS) and "Seccomp:\t2" in read("/proc/self/status"):
        return f"{word}: a seccomp filter (container) forbids it"
    if code == errno.ENOSYS:
        return f"{word}: the kernel has none"
    if code == errno.ENOMEM:
        return f"{word}: RLIMIT_MEMLOCK is too low for this kernel"
    return f"{word}: {os.strerror(code)}"


def open_reader(backend: str, loop: asyncio.AbstractEventLoop, capacity: int) -> tuple[Reader, str]:
    """A reader for `capacity` transfers at a time, and why it is that one ("" when it is what was asked for).

    backend: auto, uring or threads. Raises PresetError when "uring" was demanded and cannot be had.
    """
    from sluice.io.threads import ThreadReader

    if backend == "threads":
        return ThreadReader(loop, capacity), ""
    try:
        from sluice.io.uring import UringReader

        return UringReader(loop, capacity), ""
    except ImportError as error:
        reason = f"the liburing package is not installed ({error})"
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        reason = why_no_uring(error.errno or 0)
    if backend == "uring":
        raise PresetError(f'io.backend = "uring", but io_uring cannot be used: {reason}; use "auto" or "threads"')
    return ThreadReader(loop, capacity), f"io_uring cannot be used ({reason}), reading with threads"
