"""Counts and times of a server under the names that vLLM gives them, in Prometheus' format."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flexhybrid.serving.live import LiveAnswer, LiveBatch

#: Histogram, or counter -> its help.
TIMES = {
    "request_queue_time_seconds": "seconds from arrival to the first step",
    "time_to_first_token_seconds": "seconds from arrival to the first token",
    "request_time_per_output_token_seconds": "mean seconds of a token after the first",
    "e2e_request_latency_seconds": "seconds from arrival to the end",
}
COUNTS = {"prompt_tokens": "prompt tokens of complete answers", "generation_tokens": "generated tokens"}
BUCKETS = (*(step * 10.0**power for power in range(-3, 3) for step in (1, 2.5, 5)), 1000.0)


class Metrics:
    """The metrics of one server. All methods are called in the loop's thread."""

    def __init__(self, model: str):
        self.registry, label = CollectorRegistry(), ("model_name",)
        self._times = {
            name: Histogram(f"vllm:{name}", text, label, registry=self.registry, buckets=BUCKETS).labels(model)
            for name, text in TIMES.items()
        }
        self._counts = {
            name: Counter(f"vllm:{name}", text, label, registry=self.registry).labels(model)
            for name, text in COUNTS.items()
        }
        reasons = "complete answers by their end"
        self._ended = Counter("vllm:request_success", reasons, (*label, "finished_reason"), registry=self.registry)
        self._running = Gauge("vllm:num_requests_running", "running answers", label, registry=self.registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "waiting answers", label, registry=self.registry)
        self.model = model

    def generated(self, num_tokens: int) -> None:
        """Count generated tokens."""
        self._counts["generation_tokens"].inc(num_tokens)

    def complete(self, answer: LiveAnswer, finish_reason: str) -> None:
        """Count a complete answer."""
        now, num_tokens = time.monotonic(), len(answer.generated.token_ids)
        each = (now - answer.first_s) / max(1, num_tokens - 1)
        since = answer.begun_s - answer.submitted_s, answer.first_s - answer.submitted_s, each, now - answer.submitted_s
        for times, seconds in zip(self._times.values(), since, strict=True):
            times.observe(seconds)
        self._counts["prompt_tokens"].inc(len(answer.generated.prompt_ids))
        self._ended.labels(self.model, finish_reason).inc()

    def text(self, live: LiveBatch) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self._running.labels(self.model).set(live.num_running)
        self._waiting.labels(self.model).set(sum(live.num_waiting))
        return generate_latest(self.registry)
