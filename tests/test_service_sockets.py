"""Listening sockets and instance locks: what is made, what is replaced, and what is never touched."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.daemon.service import sockets
from sluice.daemon.service.lock import holder_pid, lock_socket, lock_store
from sluice.daemon.service.sockets import bind_unix, clear_stale, inherited_sockets
from sluice.io.errors import InstanceHeld, PresetError


def test_a_bound_socket_has_its_mode_and_goes_away_when_closed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind_unix(path, 0o640) as bound:
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        bound.close()
    assert not path.exists()
    bound.close()


def test_the_file_admits_nobody_before_its_mode_and_group_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is watched through the calls themselves: mode 0 at bind, then group, then mode, then listen."""
    path = tmp_path / "s"
    seen: list[tuple[str, int]] = []
    real_chmod, real_chown = os.chmod, os.chown

    def refuses(where: Path) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(where)) != 0

    def chown(target: Path, uid: int, gid: int, **more: bool) -> None:
        assert refuses(path)
        seen.append(("chown", stat.S_IMODE(path.stat().st_mode)))
        real_chown(target, uid, gid, **more)

    def chmod(target: Path, mode: int) -> None:
        assert refuses(path)
        seen.append(("chmod", stat.S_IMODE(path.stat().st_mode)))
        real_chmod(target, mode)

    monkeypatch.setattr(os, "chown", chown)
    monkeypatch.setattr(os, "chmod", chmod)
    import grp

    group = grp.getgrgid(os.getgid()).gr_name
    with bind_unix(path, 0o660, group):
        assert seen == [("chown", 0), ("chmod", 0)]
        assert path.stat().st_gid == os.getgid()


def test_an_unknown_group_or_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=r"server\.group.*no-such-group-here"):
        bind_unix(tmp_path / "s", 0o660, "no-such-group-here")
    with pytest.raises(PresetError, match=r"folder .*none does not exist"):
        bind_unix(tmp_path / "none" / "s")
    assert list(tmp_path.iterdir()) == []


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with bind_unix(path):
        assert sockets.someone_listens(path)


def test_a_live_socket_is_never_touched_and_its_owner_named(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind_unix(path) as live:
        inode = path.stat().st_ino
        with pytest.raises(InstanceHeld, match=rf"listening there \(pid {os.getpid()}, "):
            bind_unix(path)
        assert path.stat().st_ino == inode
        assert live.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_a_live_socket_with_a_full_backlog_counts_as_live(tmp_path: Path) -> None:
    path = tmp_path / "s"
    clients = []
    with bind_unix(path, backlog=0):
        try:
            for _ in range(4):
                client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                clients.append(client)
                client.connect_ex(str(path))
            assert sockets.someone_listens(path)
        finally:
            for client in clients:
                client.close()


@pytest.mark.parametrize("kind", ["file", "folder", "symbolic link", "dangling"])
def test_what_is_not_a_socket_is_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        target = tmp_path / "target"
        if kind == "symbolic link":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(target))
        path.symlink_to(target)
    before = path.lstat()
    with pytest.raises(PresetError, match="symbolic link" if kind == "dangling" else kind):
        bind_unix(path)
    assert path.lstat() == before


def test_a_datagram_socket_is_somebody_elses(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(PresetError, match="cannot be tested"):
            clear_stale(path)
    assert path.exists()


def test_closing_leaves_a_successor_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = bind_unix(path)
    path.unlink()
    with bind_unix(path):
        first.close()
        assert path.exists()


def test_inherited_sockets_are_taken_once_and_only_by_their_process(tmp_path: Path) -> None:
    with bind_unix(tmp_path / "a") as one, bind_unix(tmp_path / "b") as two:
        base = 200
        os.dup2(one.socket.fileno(), base)
        os.dup2(two.socket.fileno(), base + 1)
        env = {"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "http:admin", "KEEP": "1"}
        found = inherited_sockets(env, first_fd=base)
        assert [(f.name, f.path) for f in found] == [("http", tmp_path / "a"), ("admin", tmp_path / "b")]
        assert not os.get_inheritable(base)
        assert env == {"KEEP": "1"}
        assert inherited_sockets(env, first_fd=base) == []
        for inherited in found:
            inherited.socket.close()
    assert inherited_sockets({"LISTEN_FDS": "1", "LISTEN_PID": "1"}) == []
    with pytest.raises(PresetError, match="more than"):
        inherited_sockets({"LISTEN_FDS": "99", "LISTEN_PID": str(os.getpid())})


def test_a_descriptor_that_does_not_listen_is_refused(tmp_path: Path) -> None:
    env = {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "x"}
    with socket.socket(socket.AF_UNIX) as idle:
        os.dup2(idle.fileno(), 210)
        with pytest.raises(PresetError, match="no listening stream socket"):
            inherited_sockets(dict(env), first_fd=210)
        os.close(210)
    with pytest.raises(PresetError, match="descriptor 211"):
        inherited_sockets(dict(env), first_fd=211)


HOLDER = """
import sys
from pathlib import Path
from sluice.daemon.service.lock import lock_socket, lock_store
with {call}(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("call", ["lock_store", "lock_socket"])
def test_a_second_instance_names_the_holder_and_a_killed_one_holds_nothing(tmp_path: Path, call: str) -> None:
    path = tmp_path if call == "lock_store" else tmp_path / "s"
    lock = lock_store if call == "lock_store" else lock_socket
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(call=call), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(InstanceHeld, match=rf"pid {holder.pid}\b") as held:
                lock(path)
            assert held.value.exit_code == 6
        finally:
            holder.kill()
    with lock(path) as mine:
        mine.close()


def test_a_lock_needs_something_to_lock(tmp_path: Path) -> None:
    with pytest.raises(PresetError, match=r"model\.path.*No such file"):
        lock_store(tmp_path / "none")
    with pytest.raises(PresetError, match="cannot be made"):
        lock_socket(tmp_path / "none" / "s")
    (tmp_path / "s.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PresetError, match="cannot be made"):
        lock_socket(tmp_path / "s")
    assert not (tmp_path / "elsewhere").exists()


def test_the_holder_is_read_from_the_kernels_table() -> None:
    table = (
        "1: POSIX  ADVISORY  WRITE 10 fd:01:5678 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 11 fd:01:5678 0 EOF\n"
        "2: -> FLOCK  ADVISORY  WRITE 12 fd:01:5678 0 EOF\n"
        "3: FLOCK  ADVISORY  WRITE 13 00:2a:99 0 EOF\ngarbage\n"
    )
    assert holder_pid(os.makedev(0xFD, 1), 5678, table) == 11
    assert holder_pid(os.makedev(8, 1), 99, table) == 13
    assert holder_pid(os.makedev(8, 1), 98, table) is None
