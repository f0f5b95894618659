"""`sluice serve`: the process from its first check to its last drain.

Order: settings, plan (one that does not fit ends here, before anything is loaded), locks, sockets, then the
loop. The HTTP surface answers from the first moment, with 503 until the engine is attached.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.daemon.options import Config, Model, Preset, Sets, Socket, Threads, settings_from

if TYPE_CHECKING:
    from socket import socket as Listener

    from sluice.daemon.api.served import ServedModel
    from sluice.daemon.engine.planning import ModelFiles
    from sluice.daemon.service.settings import Settings


def serve(
    model: Model = None,
    socket: Socket = None,
    preset: Preset = None,
    config: Config = None,
    sets: Sets = None,
    threads: Threads = None,
) -> None:
    """Serve a model over a Unix socket until told to stop."""
    import uvloop

    from sluice.daemon.engine.assembly import configure_compute
    from sluice.daemon.engine.planning import check_least, nearest_fitting_preset, plan_engine, read_model, try_preset
    from sluice.daemon.service.lock import lock_store
    from sluice.daemon.service.log import setup_logging
    from sluice.daemon.service.process import raise_open_files

    def load_settings() -> Settings:
        return settings_from(model, preset, config, sets, threads, socket)

    # Until the loop has its own handlers a SIGTERM unwinds what is held: locks, the socket's file.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = load_settings()
    setup_logging(settings.log)
    raise_open_files()
    check_least(settings)
    from sluice.daemon.process import Daemon  # the HTTP surface takes half a second: not for a start that is refused

    files = read_model(settings)
    plan = plan_engine(files, settings)
    if plan.memory.short_bytes:
        plan.memory.check(try_preset(nearest_fitting_preset(files)))
    configure_compute(settings)
    served = served_model(files, settings)
    with lock_store(files.path), listening(settings) as listeners:
        daemon = Daemon(settings, load_settings, files, plan, served)
        uvloop.run(daemon.run(listeners.sockets))


def served_model(files: ModelFiles, settings: Settings) -> ServedModel:
    """What clients may know of the model. Raises StoreError when it has no readable tokenizer."""
    from sluice.daemon.api.served import ServedModel
    from sluice.daemon.chat.constraint import Constrainer
    from sluice.daemon.chat.tokenizer import load_tokenizer
    from sluice.daemon.engine.planning import system_fingerprint

    tokenizer = load_tokenizer(files.folder, files.config.vocab_size, chat=False)
    constrainer = None if tokenizer.markers is None else Constrainer(tokenizer)
    if constrainer is not None:
        # Holds the interpreter for seconds with K3's vocabulary: now, while nobody waits, and never on the loop.
        constrainer.warm()
    return ServedModel(
        name=files.name,
        tokenizer=tokenizer,
        created=int((files.folder / "config.json").stat().st_mtime),
        fingerprint=system_fingerprint(files, settings),
        constrainer=constrainer,
    )


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound sockets, from the service manager or our own."""

    sockets: list[Listener]


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[Listeners]:
    """The service manager's sockets where it handed some over, else our own Unix socket (locked, so that a second
    daemon is told who holds it), and the TCP listener where one is set. Raises PresetError or InstanceHeld."""
    from sluice.daemon.service.lock import lock_socket
    from sluice.daemon.service.sockets import bind_unix, inherited_sockets

    server = settings.server
    with contextlib.ExitStack() as held:
        sockets = [given.socket for given in inherited_sockets()]
        if not sockets:
            held.enter_context(lock_socket(server.socket))
            sockets.append(held.enter_context(bind_unix(server.socket, server.mode, server.group)).socket)
        if server.tcp is not None:
            sockets.append(held.enter_context(contextlib.closing(bind_tcp(server.tcp))))
        yield Listeners(sockets)


def bind_tcp(address: str) -> Listener:
    """A listening TCP socket at "HOST:PORT" or "[HOST]:PORT". Raises PresetError when it cannot be had."""
    import socket

    from sluice.daemon.service.units import parse_host_port
    from sluice.io.errors import PresetError

    host, port = parse_host_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise PresetError(f"server.tcp: {address}: {error.strerror}") from None
