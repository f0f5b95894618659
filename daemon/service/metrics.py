"""What Prometheus may ask: counters kept here as requests end, and the engine's own numbers read at scrape.

A registry of our own, so that nothing a library registers by itself appears, and two daemons in one test
process do not meet. The engine's numbers come from `EngineClient.status()`; a part it does not report is left
out, never shown as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside every counter that nobody here asks for

# A resident model answers in a tenth of a second, a streamed one takes minutes to its first token.
_FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_QUEUE_SECONDS = (0.01, 0.1, 1, 5, 10, 30, 60, 300, 600, 1800)
# Health must answer within 50 ms, so the loop's lag is told finely below that.
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)


class Metrics:
    """The daemon's metrics. Not thread-safe beyond what prometheus-client gives; called on the HTTP loop."""

    def __init__(self, status: Callable[[], Mapping[str, object]], connections: Callable[[], int] = lambda: 0) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "sluice_http_requests", "Requests ended, by route and outcome", ("route", "outcome"), registry=self.registry
        )
        self.errors = Counter("sluice_errors", "Errors told to clients, by kind", ("kind",), registry=self.registry)
        self.tokens = Counter(
            "sluice_request_tokens", "Tokens of ended requests: prompt, cached, completion", ("kind",),
            registry=self.registry,
        )  # fmt: skip
        self.queue_seconds = Histogram(
            "sluice_queue_seconds", "Time waiting before prefill", buckets=_QUEUE_SECONDS, registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "sluice_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.token_seconds = Histogram(
            "sluice_time_per_token_seconds",
            "Decode time over tokens after the first, per request",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.loop_lag = Histogram(
            "sluice_loop_lag_seconds",
            "How late a timer on the HTTP loop fired",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        self.open_requests = Gauge("sluice_http_requests_open", "Requests under way", registry=self.registry)
        open_connections = Gauge("sluice_http_connections", "Open connections", registry=self.registry)
        open_connections.set_function(connections)
        self.registry.register(EngineCollector(status))

    def request_ended(
        self,
        *,
        route: str,
        outcome: str,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        completion_tokens: int = 0,
        choices: int = 1,
        queue_seconds: float = 0.0,
        decode_seconds: float = 0.0,
        first_token_seconds: float | None = None,
    ) -> None:
        """Count one request. Times are counted only for requests that produced a token."""
        self.requests.labels(route, outcome).inc()
        for kind, count in (("prompt", prompt_tokens), ("cached", cached_tokens), ("completion", completion_tokens)):
            if count:
                self.tokens.labels(kind).inc(count)
        if first_token_seconds is None:
            return
        self.first_token_seconds.observe(first_token_seconds)
        self.queue_seconds.observe(queue_seconds)
        # Choices run side by side: the time of one step is the time of one token of each.
        steps = completion_tokens / max(1, choices) - 1
        if steps > 0 and decode_seconds > 0:
            self.token_seconds.observe(decode_seconds / steps)

    def render(self) -> bytes:
        """The text format, for GET /metrics."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Reads `EngineClient.status()` once a scrape; its docstring names the keys. Numbers only are exported."""

    def __init__(self, status: Callable[[], Mapping[str, object]]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not call the engine, which may not be loaded yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        serving = float(status.get("state") == "ready")
        yield GaugeMetricFamily("sluice_ready", "1 when requests are served", value=serving)
        queue = _mapping(status.get("queue"))
        yield from _gauges(
            queue,
            "sluice_queue_",
            waiting="Requests in the queue",
            running="Requests in prefill or decode",
            max_queue="Requests that may wait",
            max_sequences="Requests that may run at once",
        )
        family = CounterMetricFamily("sluice_tokens", "Tokens computed by the engine", labels=["kind"])
        yield from _filled(family, _mapping(status.get("tokens")))
        rates = GaugeMetricFamily("sluice_rate", "Recent rates, as in /v1/status", labels=["name"])
        yield from _filled(rates, _mapping(status.get("rates")))
        memory = _mapping(status.get("memory"))
        plan = GaugeMetricFamily("sluice_memory_plan_pool_bytes", "Planned bytes by pool", labels=["pool"])
        yield from _filled(plan, _mapping(memory.get("plan")))
        yield from _gauges(
            memory,
            "sluice_memory_",
            plan_bytes="Planned bytes, all pools",
            limit_bytes="The memory the plan must keep to",
            rss_bytes="Resident memory",
            peak_rss_bytes="The most that was ever resident",
        )
        yield from self._io(_mapping(status.get("io")))

    def _io(self, io: Mapping[str, object]) -> Iterator[Metric]:
        experts, trunk = _mapping(io.get("experts")), _mapping(io.get("trunk"))
        yield from _counters(
            experts,
            "sluice_expert_",
            hits="Experts found in memory",
            misses="Experts that had to be read",
            shared="Experts whose read was under way already",
            bytes_read="Bytes of experts read",
            wait_seconds="Time compute waited for experts",
        )
        # What the pools hold, beside what was planned for them.
        used = {
            "pinned trunk": trunk.get("pinned_bytes"),
            "ring": trunk.get("ring_bytes"),
            "expert cache": experts.get("capacity_bytes"),
        }
        pools = GaugeMetricFamily("sluice_memory_used_pool_bytes", "Bytes held by pool", labels=["pool"])
        yield from _filled(pools, used)
        yield from _gauges(experts, "sluice_expert_", cached="Experts in memory")
        yield from _counters(
            trunk,
            "sluice_trunk_",
            streamed_bytes="Bytes of trunk read while computing",
            wait_seconds="Time compute waited for the trunk",
        )
        drives = io.get("drives")
        drives = [_mapping(drive) for drive in drives] if isinstance(drives, list | tuple) else []
        for key, about in (
            ("bytes", "Bytes read, by drive"),
            ("reads", "Reads, by drive"),
            ("busy_seconds", "Time with a read in flight, by drive"),
            ("retries", "Reads tried again, by drive"),
            ("failures", "Failed reads, by drive"),
        ):
            counter = CounterMetricFamily(f"sluice_drive_{key}", about, labels=["drive"])
            yield from _filled(counter, {str(drive.get("name")): drive.get(key) for drive in drives})
        flying = GaugeMetricFamily("sluice_drive_in_flight", "Reads in flight, by drive", labels=["drive"])
        yield from _filled(flying, {str(drive.get("name")): drive.get("in_flight") for drive in drives})
        prediction = _mapping(io.get("prediction"))
        yield from _counters(
            prediction,
            "sluice_prediction_",
            hinted="Experts read ahead",
            used="Experts read ahead and then used",
            wasted_bytes="Bytes read ahead for nothing",
        )
        hinted, used_ahead = _number(prediction.get("hinted")), _number(prediction.get("used"))
        if hinted and used_ahead is not None:
            about = "Of the experts read ahead, the part that was used"
            yield GaugeMetricFamily("sluice_prediction_precision", about, value=used_ahead / hinted)


def _gauges(numbers: Mapping[str, object], prefix: str, **about: str) -> Iterator[GaugeMetricFamily]:
    for key, text in about.items():
        if (value := _number(numbers.get(key))) is not None:
            yield GaugeMetricFamily(prefix + key, text, value=value)


def _counters(numbers: Mapping[str, object], prefix: str, **about: str) -> Iterator[CounterMetricFamily]:
    for key, text in about.items():
        if (value := _number(numbers.get(key))) is not None:
            yield CounterMetricFamily(prefix + key, text, value=value)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, numbers: Mapping[str, object]
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    for label, number in numbers.items():
        if (value := _number(number)) is not None:
            family.add_metric([str(label)], value)
    if family.samples:
        yield family


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
