"""From start to stop: loading, ready, reload, drain. A pure state machine; the daemon calls it and lends callbacks.

    LOADING -> READY -> DRAINING -> STOPPED          SIGTERM while LOADING goes to STOPPED at once

Every method is called from the event loop's thread, but for `progress` (it only sends) and `reload`, which may wait for
the end of a pass and therefore runs in a thread of its own (`begin_reload`). Nothing else waits: `tick` is called a few
times a second while draining.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

from sluice.daemon.service.notify import Notifier
from sluice.daemon.service.settings import RELOADABLE, Settings, changes
from sluice.io.errors import SluiceError

log = logging.getLogger("sluice.service")
EXTENSION_SECONDS = 60.0  # asked of systemd with every sign of progress; far longer than two signs lie apart
GRACE_SECONDS = 15.0  # after the drain's deadline: ending requests, closing files; TimeoutStopSec allows for it


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the daemon lends.

    load: read the settings anew from the same sources; raises PresetError. apply: put new settings in force (budgets,
    log level, allow lists); raises SluiceError when it cannot, with the old ones still in force. stop_accepting: no new
    requests (idempotent). active: requests running or queued. end_requests: end what still runs with this message.
    """

    load: Callable[[], Settings]
    apply: Callable[[Settings], None]
    stop_accepting: Callable[[], None]
    active: Callable[[], int]
    end_requests: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Reload:
    """What a reload did: keys now in force, keys that differ in the file but need a restart, or the refusal."""

    applied: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    refused: str = ""

    def __str__(self) -> str:
        if self.refused:
            return f"reload refused, old settings kept: {self.refused}"
        parts = [f"changed {', '.join(self.applied)}" if self.applied else "nothing changed"]
        if self.needs_restart:
            parts.append(f"restart needed for {', '.join(self.needs_restart)}")
        return "reload: " + "; ".join(parts)


def merge_reloadable(old: Settings, new: Settings) -> tuple[Settings, tuple[str, ...], tuple[str, ...]]:
    """`old` with the reloadable keys of `new`; the keys that changed; the keys that differ but need a restart."""
    differing = changes(old, new)
    taken = tuple(path for path in differing if path in RELOADABLE)
    by_section: dict[str, dict[str, object]] = {}
    for path in taken:
        section, name = path.split(".")
        by_section.setdefault(section, {})[name] = new.get(path)
    sections: dict[str, object] = {
        section: dataclasses.replace(getattr(old, section), **keys) for section, keys in by_section.items()
    }
    provenance = {**old.provenance, **{path: new.provenance.get(path, "default") for path in taken}}
    merged = dataclasses.replace(old, provenance=provenance, **sections)  # type: ignore[arg-type]
    return merged, taken, tuple(path for path in differing if path not in RELOADABLE)


class Lifecycle:
    """The service's state, and what is said to systemd about it."""

    def __init__(self, settings: Settings, hooks: Hooks, notifier: Notifier, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.state = State.LOADING
        self._hooks, self._notifier, self._clock = hooks, notifier, clock
        self._deadline = float("inf")
        self._reloading: asyncio.Task[None] | None = None
        self._once_more = False

    def progress(self, text: str) -> None:
        """A sign of life while loading: shown as STATUS, and systemd's patience counts anew."""
        self._notifier.status(text)
        if self.state is State.LOADING:
            self._notifier.extend_timeout(EXTENSION_SECONDS)

    def loaded(self, status: str = "ready") -> None:
        """Everything is in place: READY. Does nothing when a stop came first."""
        if self.state is State.LOADING:
            self.state = State.READY
            self._notifier.ready(status)

    def reload(self) -> Reload:
        """SIGHUP. A bad file, or settings that cannot be put in force, leave everything as it was, and say so."""
        if self.state is not State.READY:
            return Reload(refused=f"the daemon is {self.state.value}")
        self._notifier.reloading()
        try:
            merged, taken, restart = merge_reloadable(self.settings, self._hooks.load())
            if taken:
                self._hooks.apply(merged)
            self.settings = merged
            result = Reload(taken, restart)
            log.warning(str(result)) if restart else log.info(str(result))
        except SluiceError as error:
            result = Reload(refused=str(error))
            log.error(str(result))
        if self.state is State.READY:
            self._notifier.ready(str(result))
        return result

    def begin_reload(self) -> None:
        """SIGHUP: reload in a thread. One at a time; a signal that comes meanwhile leads to one more afterwards."""
        self._once_more = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.get_running_loop().create_task(self._reload_in_thread())

    async def _reload_in_thread(self) -> None:
        while self._once_more:
            self._once_more = False
            await asyncio.to_thread(self.reload)  # its result is logged and sent to systemd

    def stop(self) -> None:
        """SIGTERM or SIGINT. The first begins the drain; the second ends it."""
        if self.state is State.LOADING:
            self._notifier.stopping("stopped while loading")
            self.state = State.STOPPED
        elif self.state is State.READY:
            self.state = State.DRAINING
            self._deadline = self._clock() + self.settings.server.drain
            self._hooks.stop_accepting()
            active = self._hooks.active()
            log.info("draining", extra={"fields": {"requests": active, "seconds": self.settings.server.drain}})
            self._notifier.stopping(f"draining {active} requests")
            self._notifier.extend_timeout(self.settings.server.drain + GRACE_SECONDS)
        elif self.state is State.DRAINING:
            self._deadline = self._clock()
        self.tick()

    def tick(self) -> State:
        """Moves a drain on: STOPPED once nothing runs, or at the deadline, when what still runs is ended."""
        if self.state is State.DRAINING:
            active = self._hooks.active()
            if active and self._clock() >= self._deadline:
                log.warning("drain deadline reached", extra={"fields": {"requests": active}})
                self._hooks.end_requests("the server is shutting down; the request was ended before it was finished")
                active = 0
            if not active:
                self.state = State.STOPPED
        return self.state


def install_signals(loop: asyncio.AbstractEventLoop, lifecycle: Lifecycle) -> None:
    """SIGTERM and SIGINT stop, SIGHUP reloads; all handled on `loop`."""
    loop.add_signal_handler(signal.SIGTERM, lifecycle.stop)
    loop.add_signal_handler(signal.SIGINT, lifecycle.stop)
    loop.add_signal_handler(signal.SIGHUP, lifecycle.begin_reload)
