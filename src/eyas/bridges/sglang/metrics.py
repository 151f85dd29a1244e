"""What SGLang says about its drafts, in the one definition of ``eyas.bridges.metrics``.

Read in srt/ of 0.5.8, 0.5.9 and 0.5.23: managers/tokenizer_manager.py (_calculate_spec_decoding_metrics: meta_info),
managers/scheduler_metrics_mixin.py, since moved to managers/scheduler_components/metrics_reporter.py (decode log and
gauges), get_internal_state in managers/scheduler.py, now scheduler_components/internal_state.py (/server_info), and
metrics/collector.py, now observability/metrics_collector.py (Prometheus). Nothing here asks for the version: names are
tried, and the two meanings of "accept rate" are told apart by the numbers themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from eyas.bridges.metrics import (
    Exposition,
    Meaning,
    MetricsError,
    Speculation,
    all_full,
    count,
    counts,
    from_histogram,
    total,
    whole,
)
from eyas.core import DraftShape

_LOG = re.compile(r"accept len: (?P<length>\d+\.\d+), accept rate: (?P<rate>\d+\.\d+)")
_RUNNING = re.compile(r"#running-req: (\d+)")
_ROUNDING = 0.005  # the log has two decimals
_LAST_INTERVAL = "of the last logging interval, not of the run"


def from_requests(meta_infos: Iterable[Mapping[str, Any]], shape: DraftShape | None = None) -> Speculation:
    """From the ``meta_info`` of finished requests. ``shape`` is what the server drafts (``draft_shape``).

    ``spec_accept_length`` is not used: it is completion_tokens / steps, and so counts the token of the prefill too.
    By position 0.5.8 says nothing. What reached a position is known of chains only: a tree's deepest path may be
    shorter than the steps it was grown in.
    """
    known, plain = [], 0
    for meta in meta_infos:
        if not isinstance(meta, Mapping):
            raise MetricsError(f"expected a request's meta_info, found {meta!r}")
        if steps := count(meta, "spec_verify_ct"):
            known.append(_request(meta, steps, shape))
        else:
            plain += 1
    if not known:
        raise MetricsError("no request has spec_verify_ct in its meta_info: none was speculated for")
    notes = (f"{plain} requests without a verify step",) if plain else ()
    return total(known, f"SGLang meta_info of {len(known)} requests", notes)


def _request(meta: Mapping[str, Any], steps: int, shape: DraftShape | None) -> Speculation:
    completion = count(meta, "completion_tokens")
    speculation = Speculation(
        "",
        steps=steps,
        drafted=count(meta, "spec_num_proposed_drafts", "spec_draft_token_num"),
        accepted=count(meta, "spec_num_correct_drafts", "spec_accept_token_num"),
        emitted=completion - 1 if completion else None,
    )
    histogram = counts(meta, "spec_correct_drafts_histogram", "spec_accept_histogram")
    if histogram is None or shape is None:
        return speculation
    if sum(histogram) != steps or len(histogram) > shape.num_steps + 1:
        return replace(speculation, notes=("a histogram does not fit steps and draft shape: left out",))
    accepted_at = from_histogram(histogram, shape.num_steps)
    chain = shape.eagle_topk == 1 and speculation.drafted == steps * shape.num_steps
    return replace(speculation, accepted_at=accepted_at, reached_at=all_full(steps, accepted_at) if chain else None)


def draft_shape(server_info: Mapping[str, Any]) -> DraftShape | None:
    """What the server drafts, from /server_info; None for a server that does not speculate."""
    steps, top_k, tokens = (
        count(server_info, f"speculative_{key}") for key in ("num_steps", "eagle_topk", "num_draft_tokens")
    )
    return DraftShape(steps, top_k, tokens) if steps and top_k and tokens else None


def from_server_info(server_info: Mapping[str, Any]) -> Speculation:
    """From /server_info: a mean since the server's start (or since its statistics were cleared), without counts.

    It is brought up to date only when a decode batch is logged. One for each data-parallel rank: several that differ
    have no mean without their weights.
    """
    states = server_info.get("internal_states")
    if not isinstance(states, list) or not all(isinstance(state, Mapping) for state in states):
        raise MetricsError("expected internal_states in /server_info, found none: not SGLang's answer")
    lengths = [state["avg_spec_accept_length"] for state in states if state.get("avg_spec_accept_length") is not None]
    if not all(isinstance(length, int | float) and length >= 0 for length in lengths):
        raise MetricsError(f"avg_spec_accept_length: expected numbers, found {lengths!r}")
    return _mean("SGLang /server_info", lengths, "since the server's start, up to the last decode log")


def from_prometheus(after: str, before: str | None = None, shape: DraftShape | None = None) -> Speculation:
    """From the text of /metrics after a run, less what it said before it.

    Where ``sglang:spec_verify_calls_total`` exists (0.5.23), finished requests give true counts: every request emits
    one token in its prefill, and the others in verify steps. Otherwise there is only a gauge, the mean length of
    the last logging interval; ``sglang:spec_accept_rate`` has two meanings and is not used.
    """
    page = Exposition.parse(after)
    earlier = Exposition.parse(before) if before is not None else None
    if page.values("sglang:spec_verify_calls_total"):
        steps, emitted, requests = (
            whole(page.increase(earlier, f"sglang:{name}_total").values(), f"sglang:{name}_total")
            for name in ("spec_verify_calls", "generation_tokens", "num_requests")
        )
        return Speculation(
            "SGLang Prometheus counters",
            steps=steps,
            drafted=steps * (shape.num_draft_tokens - 1) if shape else None,
            emitted=max(emitted - requests, 0),
            notes=("of finished requests",),
        )
    gauge = page.values("sglang:spec_accept_length")
    if not gauge:
        raise MetricsError("no sglang:spec_* in this page: metrics of SGLang, speculating, need --enable-metrics")
    return _mean("SGLang Prometheus gauge", [length for length in gauge.values() if length > 0], _LAST_INTERVAL)


def _mean(source: str, lengths: list[float], of_what: str) -> Speculation:
    if len(set(lengths)) == 1:
        return Speculation(source, mean_length=float(lengths[0]), notes=(of_what,))
    shown = ", ".join(f"{length:.2f}" for length in lengths)
    why = f"ranks differ ({shown}) and come without weights" if lengths else "nothing was verified yet"
    return Speculation(source, notes=(of_what, why))


@dataclass(frozen=True)
class LogInterval:
    """One decode line: means over the batches since the last one, rounded. ``running`` requests were in the batch."""

    length: float
    rate: float
    running: int

    def counts_bonus(self, num_draft_tokens: int) -> bool | None:
        """Whether ``rate`` counts the bonus token (up to 0.5.9) or not (0.5.23); None where both or neither fit."""
        drafts = max(num_draft_tokens - 1, 1)
        tolerance = _ROUNDING * (1 + 1 / drafts) + 1e-9
        with_bonus = abs(self.length / num_draft_tokens - self.rate) <= tolerance
        without = abs((self.length - 1) / drafts - self.rate) <= tolerance
        return with_bonus if with_bonus != without else None


def log_intervals(text: str) -> list[LogInterval]:
    """Every decode line of a server's log that speaks of drafts."""
    found = []
    for line in text.splitlines():
        if match := _LOG.search(line):
            running = _RUNNING.search(line)
            found.append(LogInterval(float(match["length"]), float(match["rate"]), int(running[1]) if running else 1))
    return found


def from_log(text: str) -> Speculation:
    """The mean of all decode lines, weighted by their running requests: an estimate, since lines have no counts.

    "accept len" is an acceptance length in every version: (accepted + bonus) / steps.
    """
    lines = [line for line in log_intervals(text) if line.running]
    if not lines:
        raise MetricsError("no decode line with 'accept len' in this log: not SGLang's, or it did not speculate")
    weight = sum(line.running for line in lines)
    return Speculation(
        f"SGLang log, {len(lines)} lines",
        mean_length=sum(line.length * line.running for line in lines) / weight,
        notes=(f"an estimate: two decimals, weighted by the running requests of {len(lines)} lines",),
    )


def meanings(rate: float, num_draft_tokens: int) -> tuple[Meaning, ...]:
    """What an "accept rate" would mean. ``num_draft_tokens`` counts the root, as SGLang's flag does."""
    drafts = num_draft_tokens - 1
    with_bonus, without = rate * num_draft_tokens, 1 + rate * drafts
    return (
        Meaning(
            "decode log and sglang:spec_accept_rate up to 0.5.9",
            f"(accepted + bonus) / (steps x {num_draft_tokens})",
            with_bonus,
            with_bonus,
        ),
        Meaning(
            "meta_info in every version; decode log and sglang:spec_accept_rate of 0.5.23",
            f"accepted / (steps x {drafts})",
            without,
            without,
        ),
    )
