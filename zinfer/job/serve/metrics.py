"""Metrics of a server, in the format of Prometheus."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from zinfer.core.request import Request
from zinfer.worker.tasks import BatchStepped

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)  # streamed weights take their time


class Metrics:
    """Counts and times of one server; the gauges are read from functions."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, running: Callable[[], float], waiting: Callable[[], float], kept: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"zinfer_{name}", help_text, labels, registry=self.registry)

        def seconds(name: str, help_text: str) -> Histogram:
            return Histogram(f"zinfer_{name}_seconds", help_text, buckets=SECONDS, registry=self.registry)

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"zinfer_{name}", help_text, registry=self.registry)

        self.requests = counter("requests", "HTTP requests.", ["path", "status"])
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts of ended rows.")
        self._cached_tokens = counter("prompt_tokens_cached", "Prompt tokens whose KV cache was reused.")
        self._tokens = counter("generated_tokens", "Tokens generated.")
        self._steps = {  # by field of `BatchStepped`
            "passes": counter("passes", "Passes of the model's weights."),
            "seconds": counter("pass_seconds", "Seconds of all passes."),
            "read": counter("kv_positions_read", "Positions of KV cache read."),
            "padded": counter("kv_positions_padded", "Positions of KV cache read that were padding."),
            "drafted": counter("drafts_verified", "Drafted tokens verified."),
            "accepted": counter("drafts_right", "Drafted tokens that were right."),
        }
        self.restarts = counter("worker_restarts", "Workers started in place of one that died.")
        self.ttft = seconds("ttft", "Time to first token.")
        self._tpot = seconds("tpot", "Time per output token after the first.")
        self._e2e = seconds("e2e", "Time to the end of a row.")
        gauge("kv_cache_kept_bytes", "Host memory of kept KV caches.").set_function(kept)
        gauge("rows_running", "Rows that run.").set_function(running)
        gauge("rows_waiting", "Rows without a token.").set_function(waiting)

    def ended(self, request: Request, cached: int, seconds: float, since_first: float) -> None:
        """Observe the time of an ended row, and since its first token."""
        self._e2e.observe(seconds)
        self._prompt_tokens.inc(len(request.prompt_ids))
        self._cached_tokens.inc(cached)
        if (tokens := len(request.output_ids)) > 1:
            self._tpot.observe(since_first / (tokens - 1))

    def stepped(self, answer: BatchStepped) -> None:
        """Count the passes of an answer of the worker."""
        self._tokens.inc(sum(len(row.tokens) for row in answer.rows))
        for name, metric in self._steps.items():
            metric.inc(getattr(answer, name))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self.registry)
