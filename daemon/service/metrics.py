"""What Prometheus may ask: counters kept here as requests end, and the engine's own numbers read at scrape.

A registry of our own, so that nothing a library registers by itself appears, and two daemons in one test
process do not meet. The engine's numbers come from `EngineClient.status()`; a part it does not report is left
out, never shown as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

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
        error: str = "",
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
        if error:
            self.errors.labels(error).inc()
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
    """Reads `status()` once a scrape. Keys it knows (all optional; numbers only):

    queue.waiting, queue.running, queue.max_queue, queue.max_sequences; tokens.prompt, tokens.generated;
    rates.*; memory.plan.<pool>, memory.used.<pool>, memory.rss_bytes, memory.limit_bytes;
    io.experts.{hits, misses, bytes}, io.trunk.{bytes, waits, wait_seconds};
    io.drives.<drive>.{bytes, reads, busy_seconds, errors}; io.prediction.{precision, recall}.
    """

    def __init__(self, status: Callable[[], Mapping[str, object]]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not call the engine, which may not be loaded yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield GaugeMetricFamily(
            "sluice_ready", "1 when requests are served", value=float(status.get("state") == "ready")
        )
        queue = _mapping(status.get("queue"))
        for key, about in (
            ("waiting", "Requests in the queue"),
            ("running", "Requests in prefill or decode"),
            ("max_queue", "Requests that may wait"),
            ("max_sequences", "Requests that may run at once"),
        ):
            if (value := _number(queue.get(key))) is not None:
                yield GaugeMetricFamily(f"sluice_queue_{key}", about, value=value)
        tokens = _mapping(status.get("tokens"))
        family = CounterMetricFamily("sluice_tokens", "Tokens computed by the engine", labels=["kind"])
        yield from _filled(family, tokens)
        rates = GaugeMetricFamily("sluice_rate", "Recent rates, as in /v1/status", labels=["name"])
        yield from _filled(rates, _mapping(status.get("rates")))
        memory = _mapping(status.get("memory"))
        for name, about in (("plan", "Planned bytes by pool"), ("used", "Bytes in use by pool")):
            pools = GaugeMetricFamily(f"sluice_memory_{name}_bytes", about, labels=["pool"])
            yield from _filled(pools, _mapping(memory.get(name)))
        for key, about in (("rss_bytes", "Resident memory"), ("limit_bytes", "The memory the plan must keep to")):
            if (value := _number(memory.get(key))) is not None:
                yield GaugeMetricFamily(f"sluice_memory_{key}", about, value=value)
        yield from self._io(_mapping(status.get("io")))

    def _io(self, io: Mapping[str, object]) -> Iterator[Metric]:
        experts = _mapping(io.get("experts"))
        for key, about in (
            ("hits", "Experts found in memory"),
            ("misses", "Experts that had to be read"),
            ("bytes", "Bytes of experts read"),
        ):
            if (value := _number(experts.get(key))) is not None:
                yield CounterMetricFamily(f"sluice_expert_{key}", about, value=value)
        trunk = _mapping(io.get("trunk"))
        for key, about in (
            ("bytes", "Bytes of trunk read"),
            ("waits", "Times compute waited for the trunk"),
            ("wait_seconds", "Time compute waited for the trunk"),
        ):
            if (value := _number(trunk.get(key))) is not None:
                yield CounterMetricFamily(f"sluice_trunk_{key}", about, value=value)
        drives = _mapping(io.get("drives"))
        for key, about in (
            ("bytes", "Bytes read, by drive"),
            ("reads", "Reads, by drive"),
            ("busy_seconds", "Time with a read in flight, by drive"),
            ("errors", "Failed reads, by drive"),
        ):
            family = CounterMetricFamily(f"sluice_drive_{key}", about, labels=["drive"])
            for drive, numbers in drives.items():
                if (value := _number(_mapping(numbers).get(key))) is not None:
                    family.add_metric([str(drive)], value)
            if family.samples:
                yield family
        prediction = _mapping(io.get("prediction"))
        for key, about in (
            ("precision", "Of the experts read ahead, the part that was used"),
            ("recall", "Of the experts used, the part that was read ahead"),
        ):
            if (value := _number(prediction.get(key))) is not None:
                yield GaugeMetricFamily(f"sluice_prediction_{key}", about, value=value)


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
