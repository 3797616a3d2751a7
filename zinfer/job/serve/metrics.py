"""Metrics of a server, in the format of Prometheus."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from zinfer.job.serve.dispatcher import Row
from zinfer.worker.tasks import BatchStepped

if TYPE_CHECKING:
    from zinfer.job.serve.dispatcher import Dispatcher

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)  # streamed weights take their time


class Metrics:
    """Counts and times of one server; a `zinfer.job.serve.dispatcher.DispatchMetrics`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self._requests = Counter("zinfer_requests", "HTTP requests.", ["path", "status"], registry=own)
        self._prompt_tokens = Counter("zinfer_prompt_tokens", "Tokens of prompts of ended rows.", registry=own)
        help_text = "Those of them whose KV cache was reused."
        self._cached_tokens = Counter("zinfer_prompt_tokens_cached", help_text, registry=own)
        self._tokens = Counter("zinfer_generated_tokens", "Tokens generated.", registry=own)
        self._passes = Counter("zinfer_passes", "Passes of the model's weights.", registry=own)
        self._seconds = Counter("zinfer_pass_seconds", "Seconds of all passes.", registry=own)
        self._read = Counter("zinfer_kv_positions_read", "Positions of KV cache read.", registry=own)
        self._padded = Counter("zinfer_kv_positions_padded", "Those of them that were padding.", registry=own)
        self._drafted = Counter("zinfer_drafts_verified", "Tokens that were guessed and verified.", registry=own)
        self._accepted = Counter("zinfer_drafts_right", "Those of them that were right.", registry=own)
        self._restarts = Counter("zinfer_worker_restarts", "Workers started in place of one that died.", registry=own)
        self._ttft = Histogram("zinfer_ttft_seconds", "Time to first token.", buckets=SECONDS, registry=own)
        self._tpot = Histogram("zinfer_tpot_seconds", "Time per output token after it.", buckets=SECONDS, registry=own)
        self._e2e = Histogram("zinfer_e2e_seconds", "Time to the end of a row.", buckets=SECONDS, registry=own)
        self._kept = Gauge("zinfer_kv_cache_kept_bytes", "Host memory of kept KV caches.", registry=own)
        self._running = Gauge("zinfer_rows_running", "Rows that run.", registry=own)
        self._waiting = Gauge("zinfer_rows_waiting", "Rows without a token.", registry=own)

    def watch(self, dispatcher: "Dispatcher") -> None:
        """Read the numbers of rows, and the bytes kept of them, from a dispatcher."""
        self._running.set_function(lambda: dispatcher.running)
        self._waiting.set_function(lambda: dispatcher.waiting)
        self._kept.set_function(lambda: dispatcher.kept_bytes)

    def request(self, path: str, status: int) -> None:
        """Count an HTTP request by its path and its status."""
        self._requests.labels(path, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """Take the time to the first token of a row."""
        self._ttft.observe(seconds)

    def ended(self, row: Row, seconds: float, since_first: float) -> None:
        """Take the time of a row that has ended, and that since its first token."""
        self._e2e.observe(seconds)
        self._prompt_tokens.inc(len(row.request.prompt_ids))
        self._cached_tokens.inc(row.cached)
        if (tokens := len(row.request.output_ids)) > 1:
            self._tpot.observe(since_first / (tokens - 1))

    def stepped(self, answer: BatchStepped) -> None:
        """Count the passes of an answer of the worker."""
        self._passes.inc(answer.passes)
        self._seconds.inc(answer.seconds)
        self._tokens.inc(sum(len(row.tokens) for row in answer.rows))
        self._read.inc(answer.read)
        self._padded.inc(answer.padded)
        self._drafted.inc(answer.drafted)
        self._accepted.inc(answer.accepted)

    def restarted(self) -> None:
        """Count a worker that was started in place of one that died."""
        self._restarts.inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' format."""
        return generate_latest(self.registry)
