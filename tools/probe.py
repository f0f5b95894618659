"""Looking at one drive: what it is, whether it reads past the page cache, and how fast.

Everything is read-only, takes paths and roots as arguments, and says "unknown" rather than guess.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "afs", "glusterfs", "lustre", "beegfs", "gpfs"}
)
NETWORK_FUSE = ("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.rclone", "fuse.s3fs", "fuse.goofys", "fuse.gcsfuse")
READ_BYTES = 16 * 2**20  # about one expert: the size the daemon reads
ALIGN = 4096


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount a path lies on. device is "major:minor", source what is mounted."""

    point: str
    kind: str
    source: str
    device: str

    @property
    def over_network(self) -> bool:
        return self.kind in NETWORK or self.kind.startswith(NETWORK_FUSE)


def find_mount(path: Path, mountinfo: str) -> Mount | None:
    """The mount of an absolute, resolved path, from /proc/self/mountinfo; later lines cover earlier ones."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(tail) < 2:
            continue
        point = fields[4]
        for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            point = point.replace(code, char)
        if path.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(point, tail[0], tail[1], fields[2])
    return best


def on_usb(device: str, root: Path = Path("/")) -> bool:
    """Whether the block device "major:minor" hangs on USB."""
    with contextlib.suppress(OSError):
        return "/usb" in os.path.realpath(root / "sys/dev/block" / device)
    return False


def spins(device: str, root: Path = Path("/")) -> bool | None:
    """Whether the drive rotates; None when the kernel does not know: a file system over several devices, a virtual disk
    (virtio calls itself rotating whatever it is)."""
    base = root / "sys/dev/block" / device
    if "/virtio" in os.path.realpath(base):
        return None
    for place in (base / "queue/rotational", base / "../queue/rotational"):  # a partition's queue is its disk's
        with contextlib.suppress(OSError):
            return place.read_text(encoding="ascii").strip() == "1"
    return None


def uring_errno() -> int:
    """0 when this process may make an io_uring, otherwise the errno of the refusal."""
    if platform.machine() not in ("x86_64", "aarch64", "riscv64"):
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = (ctypes.c_uint8 * 120)()
    fd = libc.syscall(425, 1, parameters)  # io_uring_setup has this number on every architecture above
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def direct_problem(file: Path) -> str:
    """Why a file cannot be read with O_DIRECT, by a real transfer; "" when it can."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return f"refused at open ({error.strerror})"
    try:
        with mmap.mmap(-1, ALIGN) as buffer, memoryview(buffer) as view:
            size = os.fstat(fd).st_size
            got = os.preadv(fd, [view], 0)
            return "" if got == min(size, ALIGN) else f"came back short ({got} of {min(size, ALIGN)} bytes)"
    except OSError as error:
        return f"refused at read ({error.strerror})"
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Rate:
    """What was measured: bytes per second with this many reads in flight, and whether past the page cache."""

    bytes_per_second: float
    in_flight: int
    direct: bool


def measure(files: Sequence[Path], seconds: float, in_flight: int, direct: bool) -> Rate | None:
    """Reads of 16 MiB spread over `files` for about `seconds`; None when nothing is large enough to read.

    Offsets walk by the golden ratio, so that neighbours in time are far apart on the drive.
    """
    places: list[tuple[Path, int]] = []
    for file in files:
        with contextlib.suppress(OSError):
            places.append((file, file.stat().st_size // READ_BYTES))
    places = [(file, count) for file, count in places if count > 0]
    if not places:
        return None
    handles: dict[Path, int] = {}
    total = 0
    lock = threading.Lock()
    began = time.monotonic()
    step = 0

    def read_some() -> None:
        nonlocal total, step
        with mmap.mmap(-1, READ_BYTES) as buffer, memoryview(buffer) as view:
            while time.monotonic() - began < seconds:
                with lock:
                    step += 1
                    file, count = places[step % len(places)]
                    offset = int((step * 0.6180339887498949) % 1.0 * count) * READ_BYTES
                    fd = handles[file]
                if not direct:
                    os.posix_fadvise(fd, offset, READ_BYTES, os.POSIX_FADV_DONTNEED)
                got = os.preadv(fd, [view], offset)
                with lock:
                    total += got

    problems: list[OSError] = []

    def guarded() -> None:
        try:
            read_some()
        except OSError as error:
            problems.append(error)

    try:
        for file, _ in places:
            handles[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        threads = [threading.Thread(target=guarded) for _ in range(in_flight)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
    finally:
        for fd in handles.values():
            os.close(fd)
    return Rate(total / (time.monotonic() - began), in_flight, direct)
