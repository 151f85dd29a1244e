"""Launched engines profiled by their own profilers: a few decode steps of either side, once everything is measured."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.bench import trace
from eyas.bench.launched import LaunchedSide
from eyas.bench.pairing import Plan, fitting, mixed_up
from eyas.bench.passes import SIDES, Answer, BenchError, Level, Name
from eyas.bench.sides import Say, quiet
from eyas.bench.trace import TraceError
from eyas.bench.workload import Prompt, Workload, chosen
from eyas.bridges.metrics import Exposition
from eyas.bridges.profiling import Profiling
from eyas.bridges.sglang import launch as sglang
from eyas.bridges.vllm import launch as vllm
from eyas.core import EyasError, SamplingParams, UsageError

STEPS = 10  # that are looked at
TOKENS = 256  # of an answer, at least: it must not end before the steps are over
READING = 600.0  # seconds until all prompts are read
STEPPING = 120.0  # seconds for the steps of an engine that ends by itself
GLANCE = 0.5  # seconds of steps of one that does not
WRITING = 600.0  # seconds in which it has to answer, also while it writes its trace
TICK = 0.1
TRIES = 5
_RANKS = re.compile(r"(?:TP|DP|PP|EP|rank)[-_]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Profiled:
    """A side that is to be profiled, how that is asked of its engine, and where its traces go."""

    side: LaunchedSide
    how: Profiling
    traces: Path


def prepared(sides: Mapping[Name, LaunchedSide], out: Path) -> list[Profiled]:
    """``out``: the file of the results, beside which traces are kept. Raises UsageError for an engine that has no
    profiler, or was told about it already.
    """
    found = []
    for name in SIDES:
        side, traces = sides[name], out.with_suffix(f".{name}.traces").absolute()
        if any(part.startswith(("--profiler-config", "--profiler_config")) for part in side.plan.asked.arguments):
            raise UsageError("--profiler-config is for --profile to give: leave out one of them.")
        engine = {"vllm": vllm, "sglang": sglang}[side.plan.asked.engine]
        how: Profiling = engine.profiling(side.plan.source, traces, STEPS)
        found.append(Profiled(side, how, traces))
    return found


async def profiles(
    profiled: Sequence[Profiled],
    workload: Workload,
    levels: Sequence[Level],
    sampling: SamplingParams,
    report: Say = quiet,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The split of a step of either side at each level, as plain JSON values, and what went wrong with the others.

    Each side is launched anew, now with its profiler, and alone.
    """
    found: list[dict[str, Any]] = [{"level": vars(level), "without": None, "with": None} for level in levels]
    notes = list[str]()
    for one in profiled:
        where = f"{one.side.name} speculation"
        try:
            prompts = await _launch(one, workload, levels, sampling, report)
            for entry, level in zip(found, levels, strict=True):
                report(f"profiling {where} at {level}")
                try:
                    entry[one.side.name] = await _profile(one, prompts, int(level.value))
                except EyasError as error:
                    notes.append(f"no profile {where} at {level}: {error}")
        except EyasError as error:
            notes.append(f"no profile {where}: {error}")
        finally:
            await one.side.close()
    return [entry for entry in found if entry["without"] or entry["with"]], notes


async def _launch(
    one: Profiled, workload: Workload, levels: Sequence[Level], sampling: SamplingParams, report: Say
) -> list[Prompt]:
    """Starts the engine, ready to be profiled. The prompts that fit it, with answers long enough."""
    side = one.side
    try:
        one.traces.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{one.traces} cannot be made: {error.strerror}.") from error
    environment = {**side.plan.environment, **one.how.variables}
    side.plan = replace(side.plan, command=(*side.plan.command, *one.how.flags), environment=environment)
    facts = await side.start(report)
    room = (facts.context_length or 2 * TOKENS) // 2
    tokens = max(sampling.max_tokens, min(TOKENS, room))
    side.sampling = replace(sampling, max_tokens=tokens, ignore_eos=True)
    most = max(int(level.value) for level in levels)
    plan = Plan(tuple(levels), side.sampling, rounds=1, num_prompts=most)
    return mixed_up(await fitting([side], workload, plan))


async def _profile(one: Profiled, prompts: Sequence[Prompt], running: int) -> dict[str, Any]:
    """A few steps with so many requests that write. Raises BenchError where that does not come about."""
    before = await _first_tokens(one.side)
    asked = chosen(prompts, running, 0)
    answers = [asyncio.ensure_future(one.side.ask(prompt, number)) for number, prompt in enumerate(asked)]
    try:
        await _all_write(one.side, answers, before)
        kept = set(one.traces.iterdir())
        name = f"eyas-{running}-{time.time_ns()}"
        await _start(one, name)
        deadline = time.monotonic() + (STEPPING if one.how.ends else GLANCE)
        while not (_new(one.traces, kept, name) or _over(answers) or time.monotonic() > deadline):
            await asyncio.sleep(TICK)
        await _post(one.side, "/stop_profile", None)  # which is answered once the trace is written
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    path, ranks = rank_zero(_new(one.traces, kept, name))
    counted = STEPS if one.how.whole and one.how.whole.lower() in path.name.lower() else None
    split = await asyncio.to_thread(lambda: trace.split(trace.read(path), counted))
    return {**split.as_record(), "running": running, "ranks": ranks, "trace": str(path)}


def rank_zero(paths: Sequence[Path]) -> tuple[Path, int]:
    """The trace of the first rank, and how many ranks wrote one. Raises TraceError where there is none."""
    if not paths:
        raise TraceError("the engine wrote no trace: its log may say why.")
    first = min(paths, key=lambda path: ([int(rank) for rank in _RANKS.findall(path.name)], path.name))
    return first, len(paths)


def _new(folder: Path, before: set[Path], name: str) -> list[Path]:
    """Traces since then. An engine that takes a name for them may still write one that was begun earlier."""
    found = [path for path in folder.iterdir() if path not in before and ".trace.json" in path.name]
    found = [path for path in found if "async_llm" not in path.name]  # vLLM's front end computes nothing
    named = [path for path in found if path.name.startswith(name)]
    return named or found


async def _all_write(side: LaunchedSide, answers: Sequence[asyncio.Future[Answer]], before: float) -> None:
    """Waits until every request has got its first token: no prompts are read any more."""
    deadline = time.monotonic() + READING
    while await _first_tokens(side) - before < len(answers):
        if _over(answers):
            failed = next((a.result().error for a in answers if a.done() and a.result().error), "")
            why = failed or "the first one was over before the last one had begun, so they do not run at once"
            raise BenchError(f"{len(answers)} requests do not decode together ({why}).")
        if time.monotonic() > deadline:
            raise BenchError(f"its prompts were not read within {READING:.0f} s.")
        await asyncio.sleep(TICK)


def _over(answers: Sequence[asyncio.Future[Answer]]) -> bool:
    return any(answer.done() for answer in answers)


async def _first_tokens(side: LaunchedSide) -> float:
    """How many requests have got one since the engine started, as it counts them."""
    page = Exposition.parse(await side.endpoint.page("/metrics") or "")
    name = f"{side.plan.asked.engine}:time_to_first_token_seconds_count"
    if name not in page.samples:  # which holds the request that it was started with
        raise BenchError("its /metrics do not count first tokens, so it is not known when it has read its prompts.")
    return sum(page.values(name).values())


async def _start(one: Profiled, name: str) -> None:
    """Raises BenchError where the engine refuses. One that still ends an earlier profile is asked again."""
    said = ""
    for _ in range(TRIES):
        status, said = await _post(one.side, "/start_profile", {**one.how.asked, "profile_prefix": name})
        if status < 300:
            return
        await asyncio.sleep(TICK)
    raise BenchError(f"it does not let itself be profiled: POST /start_profile answers {status} {said[:200]!r}.")


async def _post(side: LaunchedSide, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
    """The status and the text of the answer. Raises BenchError where nobody answers, with the engine's own reason."""
    try:
        return await side.endpoint.post(path, body, WRITING)
    except BenchError as error:
        raise BenchError(side.server.why if side.server and side.server.why else str(error)) from error
