"""Prometheus metrics. Names follow vLLM's, with this package's prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megakernel.request import Timings, Token
from megakernel.serve.host import Host

PREFIX = "megakernel_"
LATENCY = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
TOKEN_TIMES = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
LENGTHS = tuple(float(1 << power) for power in range(0, 18))


class Metrics:
    """One registry for one server. What is counted at a request's end costs its tokens nothing."""

    def __init__(self, host: Host) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self.requests = Counter(
            PREFIX + "http_requests", "Requests answered.", ("endpoint", "status"), registry=registry
        )
        self.finished = Counter(
            PREFIX + "request_success", "Sequences by why they ended.", ("finished_reason",), registry=registry
        )
        self.prompt_tokens = Counter(PREFIX + "prompt_tokens", "Prompt tokens taken.", registry=registry)
        self.generated = Counter(PREFIX + "generation_tokens", "Tokens given out.", registry=registry)
        self.disconnects = Counter(PREFIX + "client_disconnects", "Clients that left early.", registry=registry)
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token.", LATENCY)
        self.between = histogram("inter_token_latency_seconds", "Between tokens, by the device's clock.", TOKEN_TIMES)
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end.", LATENCY)
        self.queued = histogram("request_queue_time_seconds", "From arrival to a slot.", LATENCY)
        self.prompt_length = histogram("request_prompt_tokens", "Tokens of each prompt.", LENGTHS)
        self.output_length = histogram("request_generation_tokens", "Tokens of each output.", LENGTHS)
        registry.register(_EngineCollector(host))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def sequence(self, prompt_tokens: int, tokens: Sequence[Token], reason: str, timings: Timings) -> None:
        """Count an ended sequence."""
        self.finished.labels(reason).inc()
        self.prompt_tokens.inc(prompt_tokens)
        self.generated.inc(len(tokens))
        self.prompt_length.observe(prompt_tokens)
        self.output_length.observe(len(tokens))
        self.queued.observe(timings.queued_s)
        self.whole.observe(timings.total_s)
        if tokens:
            self.first.observe(timings.first_token_s)
        for earlier, later in pairwise(tokens):
            self.between.observe((later.time_ns - earlier.time_ns) * 1e-9)


class _EngineCollector(Collector):
    """The engine's own numbers, read when they are asked for."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, value: Callable[[], float]) -> Metric:
            return GaugeMetricFamily(PREFIX + name, text, value=value())

        def counter(name: str, text: str, value: float) -> Metric:
            return CounterMetricFamily(PREFIX + name, text, value=value)

        host, model = self._host, self._host.model
        yield gauge("up", "1 when the model takes requests.", lambda: float(host.state == "ok"))
        yield gauge("sequences_outstanding", "Sequences admitted and not ended.", lambda: host.outstanding)
        yield counter("model_reloads", "Times the model was opened again.", host.reloads)
        if model is None:
            return
        load, stats = model.engine.load(), model.engine.stats()
        yield gauge("num_requests_waiting", "Sequences that wait for a slot.", lambda: load.waiting)
        yield gauge("num_requests_running", "Sequences in slots.", lambda: load.running)
        yield gauge("kv_cache_usage_perc", "Part of the KV pages in use.", lambda: 1 - load.free_pages / load.pages)
        yield counter("prefix_cache_queries", "Prompt tokens looked up among kept prefixes.", stats.prefix.query_tokens)
        yield counter("prefix_cache_hits", "Prompt tokens found there and not computed.", stats.prefix.hit_tokens)
        yield counter("prefix_cache_evictions", "Pages of kept prefixes that made room.", stats.prefix.evictions)
        yield counter("engine_steps", "Steps of the kernel, as of the last launch's end.", stats.steps)
        yield counter("engine_launches", "Launches of the kernel.", stats.launches)
        yield counter("engine_faults", "Faults of the kernel.", stats.faults)
        streamed = stats.steps * model.program.manifest.stream_bytes
        yield counter("weight_read_bytes", "Bytes of weights read by the steps; its rate is bytes/s.", streamed)
