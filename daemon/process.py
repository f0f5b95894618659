"""The daemon at work on its loop: HTTP, loading, signals, watchdog, memory pressure, drain.

Owns the order of start and stop. What each part does is the part's own business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from socket import socket

from sluice.daemon.api.access import access_from
from sluice.daemon.api.app import create_app
from sluice.daemon.api.served import ServedModel
from sluice.daemon.api.server import HttpServer
from sluice.daemon.engine.assembly import RunningEngine, engine_limits, running_engine
from sluice.daemon.engine.client import LoopClient
from sluice.daemon.engine.planning import EnginePlan, ModelFiles
from sluice.daemon.service.lifecycle import Hooks, Lifecycle, State, install_signals
from sluice.daemon.service.log import setup_logging
from sluice.daemon.service.notify import Notifier, ProgressWatch, watchdog_seconds
from sluice.daemon.service.pressure import PressureWatch
from sluice.daemon.service.process import lock_memory, spread_memory
from sluice.daemon.service.settings import Settings
from sluice.io.errors import SluiceError

log = logging.getLogger("sluice.service")

TICK_SECONDS = 0.25
PRESSURE_SECONDS = 1.0


class Daemon:
    """One serving process, once its settings, files and plan are known to be good."""

    def __init__(
        self,
        settings: Settings,
        load_settings: Callable[[], Settings],
        files: ModelFiles,
        plan: EnginePlan,
        served: ServedModel,
    ) -> None:
        self._settings = settings
        self._files, self._plan = files, plan
        self._client = LoopClient(files.config.vocab_size, engine_limits(settings))
        self._app = create_app(self._client, served, access=access_from(settings.server))
        self._notifier = Notifier.from_environment()
        hooks = Hooks(
            load=load_settings,
            apply=self._apply,
            stop_accepting=self._stop_accepting,
            active=self._active,
            end_requests=self._end_requests,
        )
        self._lifecycle = Lifecycle(settings, hooks, self._notifier, time.monotonic)
        self._running: RunningEngine | None = None

    async def run(self, sockets: Sequence[socket]) -> None:
        """Serve on bound sockets until a signal ends it. Raises what loading raises."""
        loop = asyncio.get_running_loop()
        install_signals(loop, self._lifecycle)
        server = HttpServer(self._app, sockets)
        await server.start()
        try:
            log.info("memory %s; %s", lock_memory(), spread_memory(self._settings.compute.numa))
            self._lifecycle.progress(f"loading {self._files.name}")
            async with contextlib.AsyncExitStack() as held:
                engine = running_engine(self._files, self._plan, self._settings, progress=self._loading)
                running = await asyncio.to_thread(engine.__enter__)
                held.push_async_callback(asyncio.to_thread, engine.__exit__, None, None, None)
                if (constrainer := self._app.state.house.constrainer) is not None:
                    await asyncio.to_thread(constrainer.warm)  # else the first structured answer pays seconds for it
                await self._serve_until_stopped(running)
                await server.stop()
        except _StoppedWhileLoading:
            log.info("stopped while loading")
        finally:
            await server.stop()
            self._notifier.close()

    async def _serve_until_stopped(self, running: RunningEngine) -> None:
        self._running = running
        self._client.attach(running.engine, running.memory_and_io)
        self._lifecycle.loaded(f"serving {self._files.name}")
        log.info(
            "ready",
            extra={
                "fields": {
                    "model": self._files.name,
                    "fingerprint": running.fingerprint,
                    "plan_bytes": self._plan.memory.total,
                    "limit_bytes": self._plan.memory.limit.size,
                }
            },
        )
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(self._watch_memory(running)), tasks.create_task(self._feed_watchdog(running))]
            while self._lifecycle.tick() is not State.STOPPED:  # noqa: ASYNC110  a drain's deadline gives no event
                await asyncio.sleep(TICK_SECONDS)
            for helper in helpers:
                helper.cancel()

    def _loading(self, done: int, total: int) -> None:
        """From the loading thread: how far the weights are. Ends the loading once a signal has asked for it."""
        if self._lifecycle.state is State.STOPPED:
            raise _StoppedWhileLoading
        self._lifecycle.progress(f"loading {self._files.name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    async def _watch_memory(self, running: RunningEngine) -> None:
        watch = PressureWatch(running.shrink_cache, running.cache_bytes, time.monotonic)
        while True:
            await asyncio.sleep(PRESSURE_SECONDS)
            await asyncio.to_thread(watch.tick)

    async def _feed_watchdog(self, running: RunningEngine) -> None:
        """Pings while the pipeline moves, or has nothing to do."""
        seconds = watchdog_seconds()
        if seconds is None:
            return
        watch = ProgressWatch(self._notifier)
        while True:
            watch.tick(running.progress(), not running.engine.idle)
            await asyncio.sleep(seconds / 3)

    # --- what the life cycle asks for ----------------------------------------------------------------------------

    def _apply(self, settings: Settings) -> None:
        setup_logging(settings.log)
        access = access_from(settings.server)
        if self._running is not None:
            self._running.apply(settings)
        self._app.state.house.access = access
        self._settings = settings

    def _stop_accepting(self) -> None:
        self._app.state.house.draining = True
        if self._running is not None:
            self._running.engine.drain()

    def _active(self) -> int:
        return len(self._app.state.house.running)

    def _end_requests(self, message: str) -> None:
        self._app.state.house.end_running(_Ended(message))


class _StoppedWhileLoading(Exception):
    pass


class _Ended(SluiceError):
    http_status = 503
