"""What /metrics shows, in Prometheus' form."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxrl.engine.engine import PagedEngine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Meters:
    """Counters and gauges of one server."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "requests by endpoint and outcome", "endpoint", "outcome")  # fmt: skip
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of answered requests")
        self.response_tokens = self._counter("response_tokens", "tokens sent in responses")
        self.prefill_tokens = self._counter("prefill_tokens", "prompt tokens run through the model")
        self.shared_tokens = self._counter("shared_tokens", "prompt tokens found in the cache")
        self.sampled_tokens = self._counter("sampled_tokens", "tokens sampled by the engine")
        self.drafted_tokens = self._counter("drafted_tokens", "tokens drafted by speculation")
        self.accepted_tokens = self._counter("accepted_tokens", "drafted tokens that were sampled")
        self.preemptions = self._counter("preemptions", "sequences sent back to the queue")
        self.failures = self._counter("engine_failures", "dispatches that failed")
        self.device_s = self._counter("device_seconds", "wall time of compiled programs")
        self.host_s = self._counter("host_seconds", "wall time of the engine beside that")
        self.running = self._gauge("running", "sequences in the batch")
        self.waiting = self._gauge("waiting", "sequences in the queue")
        self.pages = self._gauge("pages", "KV pages of the pool")
        self.pages_used = self._gauge("pages_used", "KV pages that sequences hold")
        self.weights_step = self._gauge("weights_step", "training step of the weights")
        self.weights_failures = self._counter("weights_failures", "checkpoints not to be served")
        self.first_token_s = self._histogram("first_token_seconds", "from request to first token")
        self.request_s = self._histogram("request_seconds", "from request to the end of its answer")

    def observe(self, engine: PagedEngine) -> None:
        """Takes in the engine's state and its counters since the last call; on the engine's thread."""
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
        return generate_latest(self._registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"jaxrl_{name}", doc, labels, registry=self._registry)

    def _gauge(self, name: str, doc: str) -> Gauge:
        return Gauge(f"jaxrl_{name}", doc, registry=self._registry)

    def _histogram(self, name: str, doc: str) -> Histogram:
        return Histogram(f"jaxrl_{name}", doc, buckets=SECONDS, registry=self._registry)
