"""What vLLM says about its drafts, in the one definition of ``eyas.bridges.metrics``.

Read in 0.32: v1/spec_decode/metrics.py (Prometheus), v1/metrics/stats.py (RequestSpecDecodeMetrics: per
request) and v1/core/sched/scheduler.py (what counts as a draft: every step of a request that had draft tokens). vLLM's
own rate by position is accepted there / all drafts; here it is / the drafts that reached it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from eyas.bridges.metrics import (
    Exposition,
    Meaning,
    MetricsError,
    Speculation,
    by_position,
    count,
    counts,
    from_histogram,
    total,
    whole,
)

_PREFIX = "vllm:spec_decode_num_"


def from_requests(metrics: Iterable[Mapping[str, Any]]) -> Speculation:
    """From the ``metrics`` of responses (or their ``speculative_decoding``), which the server must be asked for:
    --enable-per-request-metrics and --per-request-spec-decode-metrics summary, or detailed, which is exact by position
    even where drafts were of different lengths.
    """
    known, plain = [], 0
    for one in metrics:
        said = one.get("speculative_decoding", one) if isinstance(one, Mapping) else one
        if said is not None and not isinstance(said, Mapping):
            raise MetricsError(f"expected a response's metrics, found {one!r}")
        if said and count(said, "num_spec_steps"):
            known.append(_request(said))
        else:
            plain += 1
    if not known:
        raise MetricsError(
            "no response has metrics.speculative_decoding: start the server with --enable-per-request-metrics and "
            "--per-request-spec-decode-metrics summary"
        )
    notes = (f"{plain} requests without a verify step",) if plain else ()
    return total(known, f"vLLM metrics of {len(known)} requests", notes)


def _request(said: Mapping[str, Any]) -> Speculation:
    steps, drafted, positions = (count(said, key) for key in ("num_spec_steps", "num_draft_tokens", "num_spec_tokens"))
    histogram = counts(said, "acceptance_histogram")
    if steps is None or drafted is None or positions is None or histogram is None:
        raise MetricsError("speculative_decoding lacks num_draft_tokens, num_spec_tokens or acceptance_histogram")
    if sum(histogram) != steps or len(histogram) > positions + 1:
        raise MetricsError(f"acceptance_histogram {histogram} does not fit {steps} steps of {positions} tokens")
    accepted_at = from_histogram(histogram, positions)
    speculation = Speculation("", steps, drafted, sum(accepted_at))
    if (reached_at := _detailed(said, steps, positions)) is not None:
        return replace(speculation, accepted_at=accepted_at, reached_at=reached_at)
    return by_position(speculation, accepted_at)


def _detailed(said: Mapping[str, Any], steps: int, positions: int) -> tuple[int, ...] | None:
    """A step reaches a position if its draft was that long and everything before was accepted."""
    accepted, drafted = counts(said, "per_step_accepted"), counts(said, "per_step_drafted")
    if accepted is None or drafted is None or not len(accepted) == len(drafted) == steps:
        return None
    both = list(zip(accepted, drafted, strict=True))
    return tuple(sum(d > position and a >= position for a, d in both) for position in range(positions))


def from_prometheus(after: str, before: str | None = None, model: str | None = None) -> Speculation:
    """From the text of /metrics after a run, less what it said before it; all engines (data-parallel ranks) together.

    ``model`` is the served model's name, where a page holds several. Raises CounterReset where the engine was restarted
    in between.
    """
    page = Exposition.parse(after)
    earlier = Exposition.parse(before) if before is not None else None
    labels = {} if model is None else {"model_name": model}
    if not page.values(f"{_PREFIX}drafts_total", **labels):
        raise MetricsError(f"no {_PREFIX}drafts_total in this page: not vLLM's metrics, or it does not speculate")

    def grown(what: str) -> dict[frozenset[tuple[str, str]], float]:
        return page.increase(earlier, f"{_PREFIX}{what}_total", **labels)

    steps, drafted, accepted = (
        whole(grown(what).values(), f"{_PREFIX}{what}_total") for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    speculation = Speculation("vLLM Prometheus counters", steps, drafted, accepted)
    positions: dict[int, list[float]] = {}
    for at, value in grown("accepted_tokens_per_pos").items():
        position = dict(at).get("position", "")
        if not position.isdecimal():
            raise MetricsError(f"{_PREFIX}accepted_tokens_per_pos_total: expected a position, found {position!r}")
        positions.setdefault(int(position), []).append(value)
    if not positions or sorted(positions) != list(range(len(positions))):
        return speculation
    accepted_at = tuple(whole(positions[i], "accepted_tokens_per_pos") for i in range(len(positions)))
    return by_position(speculation, accepted_at)


def meanings(rate: float, num_draft_tokens: int) -> tuple[Meaning, ...]:
    """What a percentage would mean. ``num_draft_tokens`` counts the root, as everywhere in Eyas: vLLM's K plus one."""
    drafts = num_draft_tokens - 1
    return (
        Meaning(
            "log 'Avg Draft acceptance rate', and draft_acceptance_rate of a request",
            f"accepted / (steps x {drafts})",
            1 + rate * drafts,
            1 + rate * drafts,
        ),
        Meaning("the first 'Per-position acceptance rate'", "accepted there / steps", 1 + rate, 1 + rate * drafts),
    )
