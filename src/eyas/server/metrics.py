"""Prometheus metrics in vLLM's names (eyas: for vllm:), in a registry of this server's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eyas.engine.stats import AcceptanceStats, PolicyStatistics

if TYPE_CHECKING:
    from eyas.engine.engine import Engine
    from eyas.engine.sequence import Output

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
WHOLE_ANSWER = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)


@dataclass(frozen=True)
class Snapshot:
    """The engine between two steps."""

    running: int
    waiting: int
    preemptions: int
    kv_rows: int  # tokens that fit
    kv_used: int  # tokens of running requests
    policy: PolicyStatistics

    @classmethod
    def of(cls, engine: Engine) -> Snapshot:
        """To be taken in the engine's own thread."""
        scheduler = engine.scheduler
        return cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            kv_rows=scheduler.rows,
            kv_used=sum(sequence.length for sequence in scheduler.running.values()),
            policy=engine.policy.statistics(),
        )


class Metrics:
    """What happened since the server's start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.acceptance = AcceptanceStats()  # of finished answers
        self._requests = self._counter("http_requests", "HTTP requests.", "endpoint", "status")
        self._finished = self._counter("request_success", "Finished answers.", "finished_reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, of finished answers.")
        self._cached_tokens = self._counter("prefix_cache_hits", "Tokens of prompts that were in memory already.")
        self._tokens = self._counter("generation_tokens", "Tokens of answers.")
        self._first = self._histogram("time_to_first_token_seconds", "From the read request on.", FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "From token to token.", BETWEEN_TOKENS)
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From the read request until an answer is complete.", WHOLE_ANSWER
        )
        ProcessCollector(registry=self.registry)

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def heard(self, output: Output, since: float, first: bool) -> None:
        """``since`` is the time from the output before this one, or from the request where it is the ``first``."""
        count = len(output.emitted)
        self._tokens.inc(count)
        if first:
            self._first.observe(since)
            return
        for _ in output.emitted:
            self._between.observe(since / count)

    def finished(self, output: Output, prompt_tokens: int, seconds: float) -> None:
        self._finished.labels(output.finish_reason).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(output.cached_tokens)
        self._whole.observe(seconds)
        if output.stats is not None:
            self.acceptance.add(output.stats)

    def text(self, snapshot: Snapshot | None) -> bytes:
        """``snapshot`` is the engine's state, None where there is no engine."""
        live = CollectorRegistry()
        live.register(_Live(self.acceptance, snapshot))
        return generate_latest(self.registry) + generate_latest(live)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"eyas:{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"eyas:{name}", help, buckets=buckets, registry=self.registry)


class _Live(Collector):
    """What is counted elsewhere, read when somebody asks."""

    def __init__(self, acceptance: AcceptanceStats, snapshot: Snapshot | None):
        self._stats, self._snapshot = acceptance, snapshot

    def collect(self) -> Iterator[Metric]:
        yield from self._acceptance(self._stats)
        if self._snapshot is not None:
            yield from self._engine(self._snapshot)

    def _acceptance(self, stats: AcceptanceStats) -> Iterator[Metric]:
        yield counter("spec_decode_num_drafts", "Verify steps.", stats.steps)
        yield counter("spec_decode_num_draft_tokens", "Draft tokens verified.", stats.drafted)
        yield counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", sum(stats.accepted))
        yield counter("spec_decode_num_emitted_tokens", "Tokens of verify steps, with bonus tokens.", stats.emitted)
        yield gauge("acceptance_length", "Tokens per verify step, bonus token included.", stats.acceptance_length)
        for name, counts, what in (
            ("spec_decode_num_accepted_tokens_per_pos", stats.accepted, "Accepted at a draft position."),
            ("spec_decode_num_reached_per_pos", stats.reached, "Drafts still right before a draft position."),
        ):
            family = CounterMetricFamily(f"eyas:{name}", what, labels=["position"])
            for position, count in enumerate(counts):
                family.add_metric([str(position)], count)
            yield family

    def _engine(self, seen: Snapshot) -> Iterator[Metric]:
        yield gauge("num_requests_running", "Answers in the making.", seen.running)
        yield gauge("num_requests_waiting", "Answers that wait for a place.", seen.waiting)
        yield counter("num_preemptions", "Answers put back for want of memory.", seen.preemptions)
        yield gauge("kv_cache_tokens", "Tokens whose keys and values fit.", seen.kv_rows)
        yield gauge(
            "kv_cache_usage_perc", "Part of them that running answers hold, 0 to 1.", seen.kv_used / seen.kv_rows
        )
        steps = CounterMetricFamily("eyas:policy_steps", "Decoding steps by what was drafted.", labels=["choice"])
        speeds = GaugeMetricFamily("eyas:policy_tokens_per_second", "Measured, by what was drafted.", labels=["choice"])
        for choice, share in seen.policy.shares.items():
            steps.add_metric([choice], round(share * seen.policy.steps))
        for choice, speed in seen.policy.measured.items():
            speeds.add_metric([choice], speed)
        yield from (steps, speeds)


def counter(name: str, help: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"eyas:{name}", help, value=value)


def gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"eyas:{name}", help, value=value)
