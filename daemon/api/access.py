"""Who may ask. On the Unix socket the kernel says who that is (SO_PEERCRED); on TCP a bearer token does.

Socket mode and group are the first fence and the service's business; this is the second.
"""

from __future__ import annotations

import grp
import hmac
import os
import pwd
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sluice.daemon.api.errors import Refusal
from sluice.daemon.api.exchange import Exchange
from sluice.daemon.service.settings import ServerSettings
from sluice.io.errors import PresetError

_SO_PEERGROUPS = getattr(socket, "SO_PEERGROUPS", 59)  # Linux 4.13; not named by Python
_MIN_TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as it was when it connected."""

    pid: int
    uid: int
    gids: frozenset[int]


class PeerConnection(Protocol):
    """The part of a connection that access looks at."""

    @property
    def listener(self) -> str: ...

    @property
    def peer(self) -> Peer | None: ...


def peer_of(connection: socket.socket) -> Peer | None:
    """The peer of a connected Unix socket; None when the kernel does not tell."""
    try:
        pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        return None
    gids = {gid}
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * 65536)
        gids.update(struct.unpack(f"{len(groups) // 4}I", groups))
    except OSError:
        pass  # an old kernel: the primary group alone
    return Peer(pid, uid, frozenset(gids))


@dataclass(slots=True)
class Access:
    """The rules in force; `replace` puts others into force for every request that comes after.

    uids, gids: the allow lists of the Unix socket; both empty means whoever the socket's mode
    lets in. `always` are let in beside a list: root, who could anyhow, and the daemon's own user.
    token: what TCP must present; without one no TCP request is served."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    token: bytes | None = None
    always: frozenset[int] = field(default_factory=lambda: frozenset({0, os.getuid()}))

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < _MIN_TOKEN_BYTES:
            raise PresetError(f"the bearer token has {len(self.token)} bytes; it needs at least {_MIN_TOKEN_BYTES}")

    def replace(self, other: Access) -> None:
        """Take over the rules of `other`, at a reload."""
        self.uids, self.gids, self.token, self.always = other.uids, other.gids, other.token, other.always

    def allows(self, peer: Peer | None) -> bool:
        """Whether the lists let `peer` in."""
        if not self.uids and not self.gids:
            return True
        if peer is None:
            return False
        return peer.uid in self.uids or peer.uid in self.always or not self.gids.isdisjoint(peer.gids)

    def check(self, exchange: Exchange) -> None:
        """Raises Refusal 403 for a peer the lists do not name, 401 for TCP without the token. The body is
        not read for either."""
        connection = exchange.scope.get("state", {}).get("connection")
        if connection is None or connection.listener != "unix":
            self._check_token(exchange)
        elif not self.allows(connection.peer):
            uid = connection.peer.uid if connection.peer else "unknown"
            raise Refusal(403, f"user id {uid} may not use this daemon (allow_users, allow_groups)", close=True)

    def _check_token(self, exchange: Exchange) -> None:
        given = (exchange.header(b"authorization") or "").encode("latin-1")
        scheme, _, value = given.partition(b" ")
        # The comparison takes the same time wherever the two differ; a missing token is compared like a wrong one.
        right = hmac.compare_digest(value.strip(), self.token or b"\0" * _MIN_TOKEN_BYTES)
        if self.token is None or scheme.lower() != b"bearer" or not right:
            raise Refusal(
                401,
                "the TCP listener needs 'Authorization: Bearer TOKEN' with the token of server.token_file",
                close=True,
                headers=(("www-authenticate", "Bearer"),),
            )


def access_from(settings: ServerSettings) -> Access:
    """The rules of the `[server]` section. Raises PresetError for a user or group this machine does not know, a
    token file that cannot be read, is empty or may be read by others, and a TCP listener without one."""
    uids, gids = set(), set()
    for user in settings.allow_users:
        try:
            uids.add(pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise PresetError(f"server.allow_users names {user!r}, which is no user of this machine") from None
    for group in settings.allow_groups:
        try:
            gids.add(grp.getgrnam(group).gr_gid)
        except KeyError:
            raise PresetError(f"server.allow_groups names {group!r}, which is no group of this machine") from None
    token = None if settings.token_file is None else read_token(settings.token_file)
    if settings.tcp is not None and token is None:
        raise PresetError(f"server.tcp is {settings.tcp}, but server.token_file names no file with a token for it")
    return Access(frozenset(uids), frozenset(gids), token)


def read_token(path: Path) -> bytes:
    """The first line of a token file. Raises PresetError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            first = file.readline(4097)
    except OSError as exc:
        raise PresetError(f"server.token_file {path}: {exc.strerror or exc}") from exc
    if mode & 0o007:
        raise PresetError(f"server.token_file {path} is open to other users (mode {mode & 0o777:o}); chmod o= it")
    token = first.strip()
    if not token or len(first) > 4096:
        raise PresetError(f"server.token_file {path}: the first line must hold the token")
    return token
