"""Prometheus metrics of the server, as exposed at /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxrl.engine.engine import PagedEngine

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "requests by endpoint and outcome", "endpoint", "outcome"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of completed requests")
        self.response_tokens = self._counter("response_tokens", "tokens sent in responses")
        self.malformed_calls = self._counter(
            "malformed_calls", "tool calls of the model that could not be read"
        )
        self.prefill_tokens = self._counter("prefill_tokens", "prompt tokens computed by prefill")
        self.shared_tokens = self._counter(
            "shared_tokens", "prompt tokens served from the prefix cache"
        )
        self.sampled_tokens = self._counter("sampled_tokens", "tokens sampled by the engine")
        self.drafted_tokens = self._counter("drafted_tokens", "speculative draft tokens")
        self.accepted_tokens = self._counter("accepted_tokens", "draft tokens that were accepted")
        self.preemptions = self._counter("preemptions", "preempted sequences")
        self.failures = self._counter("engine_failures", "dispatches that failed")
        self.device_s = self._counter("device_seconds", "wall time in compiled programs")
        self.host_s = self._counter("host_seconds", "wall time of the engine on the host")
        self.running = self._gauge("running", "sequences in the batch")
        self.waiting = self._gauge("waiting", "sequences in the queue")
        self.pages = self._gauge("pages", "KV pages of the pool")
        self.pages_used = self._gauge("pages_used", "KV pages that sequences hold")
        self.weights_step = self._gauge("weights_step", "training step of the served weights")
        self.weights_failures = self._counter(
            "weights_failures", "checkpoints that could not be served"
        )
        self.first_token_s = self._histogram("first_token_seconds", "time to first token")
        self.request_s = self._histogram("request_seconds", "end-to-end request latency")

    def observe(self, engine: PagedEngine) -> None:
        """Records the engine's state, and its counters since the last call; call on its thread."""
        scheduler, stats = engine.scheduler, engine.take_stats()
        self.prefill_tokens.inc(stats.n_prefill_tokens)
        self.shared_tokens.inc(stats.n_cached_tokens)
        self.sampled_tokens.inc(stats.n_tokens)
        self.drafted_tokens.inc(stats.n_draft_tokens)
        self.accepted_tokens.inc(stats.n_accepted_tokens)
        self.preemptions.inc(stats.n_preempted)
        self.device_s.inc(stats.device_s)
        self.host_s.inc(stats.host_s)
        self.running.set(scheduler.n_running)
        self.waiting.set(scheduler.n_waiting)
        self.pages.set(scheduler.n_pages)
        self.pages_used.set(scheduler.n_pages_used)

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"jaxrl_{name}", doc, labels, registry=self._registry)

    def _gauge(self, name: str, doc: str) -> Gauge:
        return Gauge(f"jaxrl_{name}", doc, registry=self._registry)

    def _histogram(self, name: str, doc: str) -> Histogram:
        return Histogram(f"jaxrl_{name}", doc, buckets=BUCKETS_S, registry=self._registry)
