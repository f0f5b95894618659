"""Listening sockets: those systemd hands over, or our own, made so that nobody can connect before mode and group stand.

What already lies at the path is touched only when it is a socket, and a connect shows that nobody listens on it.
A regular file, a symbolic link, a folder or a live socket is refused and left as it is.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import socket
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sluice.io.errors import InstanceHeld, PresetError

FIRST_FD = 3  # SD_LISTEN_FDS_START
BACKLOG = 128
MOST_SOCKETS = 16


@dataclass(frozen=True, slots=True)
class Inherited:
    """One socket from the service manager. `path` is None unless it is a Unix socket with a file."""

    socket: socket.socket
    name: str
    path: Path | None


def inherited_sockets(env: MutableMapping[str, str] | None = None, *, first_fd: int = FIRST_FD) -> list[Inherited]:
    """The listening stream sockets of LISTEN_FDS, if they are meant for this process; otherwise [].

    Takes the variables out of `env`, so that no child believes they are its own, and marks the sockets close-on-exec.
    Raises PresetError when a descriptor is not a listening stream socket (Accept=yes, or a datagram unit).
    """
    env = os.environ if env is None else env
    count, pid = env.pop("LISTEN_FDS", ""), env.pop("LISTEN_PID", "")
    names = env.pop("LISTEN_FDNAMES", "").split(":")
    if not count.isdigit() or pid != str(os.getpid()):
        return []
    if int(count) > MOST_SOCKETS:
        raise PresetError(f"LISTEN_FDS={count}: more than {MOST_SOCKETS} sockets handed over")
    found: list[Inherited] = []
    for index in range(int(count)):
        fd = first_fd + index
        name = names[index] if index < len(names) else ""
        try:
            os.set_inheritable(fd, False)
            given = socket.socket(fileno=fd)
        except OSError as error:
            raise PresetError(f"socket activation: descriptor {fd} ({name}): {error.strerror}") from None
        if given.type != socket.SOCK_STREAM or not given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            given.detach()
            raise PresetError(f"socket activation: descriptor {fd} ({name}) is no listening stream socket")
        address = given.getsockname() if given.family == socket.AF_UNIX else ""
        path = Path(address) if isinstance(address, str) and address.startswith("/") else None
        found.append(Inherited(given, name, path))
    return found


def _in_the_way(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PresetError(f"server.socket: {path}: {error.strerror}") from None


def someone_listens(path: Path) -> bool:
    """Whether a connect to the Unix socket at `path` finds a listener. A full backlog counts as one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        code = probe.connect_ex(str(path))
    if code in (errno.ECONNREFUSED, errno.ENOENT):
        return False
    if code in (0, errno.EAGAIN, errno.EINPROGRESS):
        return True
    # Another type of socket (EPROTOTYPE) or no permission: somebody's, and not ours to judge.
    raise PresetError(f"server.socket: {path}: cannot be tested: {os.strerror(code)}; remove it by hand if it is dead")


def clear_stale(path: Path) -> bool:
    """Removes a dead socket file at `path`; whether there was one. Raises InstanceHeld when a process listens there,
    PresetError when it is anything but a socket."""
    before = _in_the_way(path)
    if before is None:
        return False
    if not stat.S_ISSOCK(before.st_mode):
        kind = "symbolic link" if stat.S_ISLNK(before.st_mode) else "folder" if stat.S_ISDIR(before.st_mode) else "file"
        raise PresetError(f"server.socket: {path} is a {kind}, not a socket; it is left alone, choose another path")
    if someone_listens(path):
        raise InstanceHeld(f"server.socket: {path}: a process is listening there{_listener_hint(path)}")
    after = _in_the_way(path)
    if after is not None and (after.st_dev, after.st_ino) == (before.st_dev, before.st_ino):
        path.unlink(missing_ok=True)
    return True


def _listener_hint(path: Path) -> str:
    """ " (pid N, name)" of who answers at `path`, where the kernel tells."""
    import struct

    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        probe.connect(str(path))
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        comm = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip() if pid else "?"
        return f" (pid {pid}, {comm})"
    return ""


class BoundSocket:
    """A listening Unix socket of our own. Closing removes its file, if it is still ours. Closing twice is harmless."""

    def __init__(self, listener: socket.socket, path: Path, identity: tuple[int, int]) -> None:
        self.socket, self.path, self._identity = listener, path, identity
        self._open = True

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self._identity:
                self.path.unlink()
        self.socket.close()

    def __enter__(self) -> BoundSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def bind_unix(path: Path, mode: int = 0o660, group: str | None = None, backlog: int = BACKLOG) -> BoundSocket:
    """Listens at `path` with exactly `mode` and `group`. Raises PresetError (path, group, permission) or InstanceHeld.

    Order matters. The file appears with mode 0 (Linux gives it the unbound socket's own mode), gets its group, then
    its mode, and only then does anybody listen: there is no moment in which a stranger could connect.
    """
    gid = -1
    if group is not None:
        try:
            gid = grp.getgrnam(group).gr_gid
        except KeyError:
            raise PresetError(
                f"server.group: {group!r}: no such group; make it with `groupadd --system {group}`"
            ) from None
    clear_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        os.fchmod(listener.fileno(), 0)
        listener.bind(str(path))
        made = path.lstat()
        try:
            if gid != -1:
                os.chown(path, -1, gid, follow_symlinks=False)
            os.chmod(path, mode)
            listener.listen(backlog)
        except OSError:
            path.unlink(missing_ok=True)
            raise
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InstanceHeld(f"server.socket: {path}: another process made it just now") from None
        if error.errno == errno.ENOENT:
            raise PresetError(
                f"server.socket: {path}: the folder {path.parent} does not exist; make it first"
            ) from None
        if error.errno == errno.EPERM and gid != -1:
            raise PresetError(f"server.group: {group!r}: not a group this process may give away to {path}") from None
        raise PresetError(f"server.socket: {path}: {error.strerror}") from None
    return BoundSocket(listener, path, (made.st_dev, made.st_ino))
