"""The two sides of a comparison: endpoints, or the embedded engine with and without its drafter."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eyas import __version__
from eyas.bench.client import Endpoint
from eyas.bench.facts import Facts, facts_of, told
from eyas.bench.passes import PARTS, STEPS, Answer, BenchError, Heard, Name
from eyas.bench.workload import Prompt
from eyas.bridges import metrics
from eyas.bridges.metrics import Exposition, MetricsError, Speculation
from eyas.bridges.sglang import metrics as sglang
from eyas.bridges.vllm import metrics as vllm
from eyas.core import EyasError, RequestError, SamplingParams
from eyas.training.sources import file_hash

if TYPE_CHECKING:
    from eyas.engine.llm import LLM
    from eyas.engine.lossless import Comparer
    from eyas.engine.policy import Policy, StepReport
    from eyas.engine.serving import AsyncLLM

PROBE = Prompt("probe", "probe", [{"role": "user", "content": "Say hello."}])
CLIENT_BUSY = 0.7  # of a CPU, which is all that one thread can use
STRANGERS = 0.05  # share of a server's tokens that are not ours, above which it is said


Say = Callable[[str], None]  # what is being done


def quiet(what: str) -> None:
    pass


@dataclass(frozen=True)
class Unlike:
    """Where two answers part: how far the side without was from choosing otherwise, and whether that explains it."""

    gap: float | None  # between its best token and the next one, in log-probability or score; None: not known
    near_tie: bool | None = None  # None: the definition needs the model itself


class Side(Protocol):
    name: Name

    async def start(self, report: Say = quiet) -> Facts:
        """Finds out what it is and whether it answers. Raises EyasError where it does not."""

    async def room(self, prompt: Prompt) -> str:
        """Why this prompt cannot be asked, empty where it can."""

    async def ask(self, prompt: Prompt, number: int) -> Answer: ...

    async def before(self) -> Any:
        """Called before each pass; what it returns is given to ``after``."""

    async def after(self, before: Any, answers: Sequence[Answer]) -> Heard:
        """What is known of a pass that has just been made, beyond its answers."""

    async def alive(self) -> bool: ...

    async def explain(self, prompt: Prompt, mine: Answer, other: Answer) -> Unlike:
        """Why the other side may have answered otherwise. Called on the side without speculation."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Before:
    """A pass's beginning: what the server had counted, and what this process had used of a CPU by then."""

    metrics: str
    forgot: bool  # its prefix cache is empty
    cpu: float  # seconds
    clock: float

    def notes(self, share: float) -> tuple[str, ...]:
        """``share``: of a CPU, that this process has used since."""
        notes: tuple[str, ...] = ()
        if not self.forgot:
            notes = ("its prefix cache is not emptied: prompts that repeat are answered from it",)
        if share > CLIENT_BUSY:
            notes += (f"this client used more than {CLIENT_BUSY:.0%} of a CPU: it may be the limit, not the server",)
        return notes


@dataclass
class EndpointSide:
    """``seeded``: send a seed with every request, which some servers pay for."""

    name: Name
    endpoint: Endpoint
    sampling: SamplingParams
    seeded: bool = False
    facts: Facts = field(init=False)

    async def start(self, report: Say = quiet) -> Facts:
        asked = ("as text" if self.endpoint.completions else "as messages") + (", with seeds" if self.seeded else "")
        self.facts = replace(facts_of(self.endpoint.root, await told(self.endpoint)), asked=asked)
        answer = await self.endpoint.ask(PROBE, replace(self.sampling, max_tokens=8))
        if answer.error:
            hint = ": try --completions" if answer.error.startswith(("HTTP 400", "HTTP 404")) else ""
            raise BenchError(f"{self.endpoint.shown} does not answer ({answer.error}){hint}.")
        if answer.first is None:
            silent = "it does not stream: times to the first and between tokens are unknown"
            self.facts = replace(self.facts, notes=(*self.facts.notes, silent))
        if _drafts(answer):
            self.facts = replace(self.facts, speculates=True)
        return self.facts

    async def room(self, prompt: Prompt) -> str:
        if self.surely_fits(prompt):
            return ""
        most, wanted = self.facts.context_length, self.sampling.max_tokens
        answer = await self.endpoint.ask(prompt, replace(self.sampling, max_tokens=1))
        if answer.lost:
            raise BenchError(f"{self.endpoint.shown} is gone ({answer.error}): is the server running?")
        if answer.error:
            return f"refused ({answer.error})"
        if most is not None and answer.prompt_tokens is not None and answer.prompt_tokens + wanted > most:
            return f"too long for a context of {most:,} tokens"
        return ""

    def surely_fits(self, prompt: Prompt) -> bool:
        """Without asking: no token is less than a byte."""
        most = self.facts.context_length
        return most is None or len(prompt.text.encode()) + self.sampling.max_tokens + 64 <= most

    async def ask(self, prompt: Prompt, number: int) -> Answer:
        seed = self.sampling.seed + number if self.seeded else None
        return await self.endpoint.ask(prompt, self.sampling, seed)

    async def before(self) -> Before:
        """Empties the prefix cache, or the side that comes second, or later, would find its prompts there."""
        given = self.facts.settings
        none = given.get("disable_radix_cache") or given.get("no_enable_prefix_caching")
        forgot = await self.endpoint.forget() or bool(none) or given.get("enable_prefix_caching") is False
        return Before(await self.endpoint.page("/metrics") or "", forgot, time.process_time(), time.perf_counter())

    async def after(self, before: Before, answers: Sequence[Answer]) -> Heard:
        share = (time.process_time() - before.cpu) / (time.perf_counter() - before.clock)
        after, notes = await self.endpoint.page("/metrics") or "", before.notes(share)
        try:
            notes += self._strangers(before.metrics, after, answers)
            if self.facts.speculates is False:
                return Heard(None, notes)
            known = await self._known(before.metrics, after, answers)
            return Heard(known, (*notes, *(f"acceptance, from {known.source}: {note}" for note in known.notes)))
        except MetricsError as error:
            return Heard(None, (*notes, f"acceptance is unknown: {error}"))

    async def alive(self) -> bool:
        return await self.endpoint.alive()

    async def explain(self, prompt: Prompt, mine: Answer, other: Answer) -> Unlike:
        """Asks again, with log-probabilities."""
        if self.sampling.temperature:
            return Unlike(None)
        choices = await self.endpoint.choices(prompt, self.sampling)
        place, text = common(mine.text, other.text), ""
        for token, gap in choices:
            text += token
            if len(text) > place:  # this time, it may have answered otherwise before
                return Unlike(gap if text.startswith(mine.text[:place]) else None)
        return Unlike(None)

    async def close(self) -> None:
        await self.endpoint.close()

    async def _known(self, before: str, after: str, answers: Sequence[Answer]) -> Speculation:
        """The best that is told: by request, by counters, by a mean."""
        if "eyas:spec_decode_num_drafts_total" in after:
            return _from_eyas(Exposition.parse(after), Exposition.parse(before))
        good = [answer.said for answer in answers if not answer.error]
        if good and all("speculative" in said for said in good):
            return _from_usage([said["speculative"] for said in good])
        if good and any("speculative_decoding" in said.get("metrics", {}) for said in good):
            return vllm.from_requests([said.get("metrics", {}) for said in good])
        if good and any("spec_verify_ct" in said.get("meta_info", {}) for said in good):
            return sglang.from_requests([said.get("meta_info", {}) for said in good], self.facts.shape)
        if "vllm:spec_decode_num_drafts_total" in after:
            return vllm.from_prometheus(after, before or None)
        if "sglang:spec_" in after:
            return sglang.from_prometheus(after, before or None, self.facts.shape)
        if self.facts.engine == "SGLang":
            info = await self.endpoint.json("/server_info") or await self.endpoint.json("/get_server_info") or {}
            return sglang.from_server_info(info)
        raise MetricsError("the server tells nothing about its drafts")

    def _strangers(self, before: str, after: str, answers: Sequence[Answer]) -> tuple[str, ...]:
        """Whether the server wrote more tokens than we asked for."""
        for name in (f"{engine}:generation_tokens_total" for engine in ("vllm", "sglang", "eyas")):
            if name in after:
                grown = sum(Exposition.parse(after).increase(Exposition.parse(before), name).values())
                ours = sum(answer.tokens for answer in answers)
                if grown > ours * (1 + STRANGERS) + 64 and not any(answer.error for answer in answers):
                    return (f"the server wrote {grown:,.0f} tokens, and {ours:,} were asked for: it served others too",)
        return ()


def _from_eyas(after: Exposition, before: Exposition) -> Speculation:
    """From the counters of Eyas's server, which count as we do."""

    def grown(what: str) -> dict[metrics.Labels, float]:
        return after.increase(before, f"eyas:spec_decode_num_{what}_total")

    def by_position(what: str) -> tuple[int, ...]:
        counts = {int(dict(at)["position"]): int(value) for at, value in grown(f"{what}_per_pos").items()}
        return tuple(counts[position] for position in sorted(counts))

    steps, drafted, accepted, emitted = (
        metrics.whole(grown(what).values(), what)
        for what in ("drafts", "draft_tokens", "accepted_tokens", "emitted_tokens")
    )
    accepted_at, reached_at = by_position("accepted_tokens"), by_position("reached")
    return Speculation("Eyas's counters", steps, drafted, accepted, emitted, accepted_at, reached_at)


def _from_usage(parts: Sequence[Mapping[str, Any]]) -> Speculation:
    """From ``usage.speculative`` of Eyas's server."""
    steps, drafted, accepted = (sum(metrics.count(p, n) or 0 for p in parts) for n in ("steps", "drafted", "accepted"))
    return Speculation(f"usage of {len(parts)} requests", steps, drafted, accepted)


def _drafts(answer: Answer) -> bool:
    said = answer.said.get("speculative", {}), answer.said.get("metrics", {}), answer.said.get("meta_info", {})
    return bool(said[0].get("steps") or said[1].get("speculative_decoding") or said[2].get("spec_verify_ct"))


# The embedded engine


class StepTimes:
    """A policy that decides as the one inside does, and adds up where the time of the steps goes."""

    def __init__(self, policy: Policy):
        self._policy, self.name, self.shapes = policy, type(policy).__name__.lower(), policy.shapes
        self.decide, self.follow, self.statistics = policy.decide, policy.follow, policy.statistics
        self.clear()

    def clear(self) -> None:
        self.steps, self.propose, self.verify, self.rest = 0, 0.0, 0.0, 0.0

    def observe(self, report: StepReport) -> None:
        self.steps += 1
        self.propose += report.propose_seconds
        self.verify += report.verify_seconds
        self.rest += report.rest_seconds
        self._policy.observe(report)


@dataclass
class Embedded:
    """The engine in this process, which both sides share: the same weights, the same memory, the same kernels."""

    llm: LLM
    drafter: str | None = None  # where it came from
    times: StepTimes = field(init=False)
    serving: AsyncLLM | None = None

    def __post_init__(self) -> None:
        self.use(self.llm.engine.policy)

    def use(self, policy: Policy) -> None:
        """Who decides from now on, about drafts and whether a prompt is read for them. While nothing runs."""
        engine, self.times = self.llm.engine, StepTimes(policy)
        engine.policy = self.times
        if engine.drafter is not None:
            engine.scheduler.follow = policy.follow

    @cached_property
    def comparer(self) -> Comparer:
        """Keeps an fp32 copy of the target, for differences."""
        from eyas.engine.lossless import Comparer

        return Comparer(self.llm)

    def start(self) -> None:
        from eyas.engine.serving import AsyncLLM

        self.serving = self.serving or AsyncLLM(self.llm)

    def close(self) -> None:
        if self.serving is not None:
            self.serving.close()
            self.serving = None


@dataclass
class EngineSide:
    """With ``name`` "without", requests ask not to be drafted for: plain decoding in the same engine."""

    name: Name
    engine: Embedded
    sampling: SamplingParams
    _stats: list[Any] = field(default_factory=list)

    async def start(self, report: Say = quiet) -> Facts:
        self.engine.start()
        llm = self.engine.llm
        drafter = self.name == "with" and llm.drafter is not None
        shape = llm.engine.shape if drafter else None
        return Facts(
            "this process",
            engine="Eyas",
            version=__version__,
            model=llm.name,
            context_length=llm.context_length,
            max_running_requests=llm.engine.scheduler.max_running,
            speculates=drafter,
            shape=shape,
            settings={
                "dtype": str(llm.target.dtype).removeprefix("torch."),
                "device": str(llm.target.device),
                "speculation": self.engine.times.name if drafter else "off",
            }
            | ({"drafter": hashed(self.engine.drafter)} if drafter and self.engine.drafter else {}),
        )

    async def room(self, prompt: Prompt) -> str:
        most, count = self.engine.llm.context_length, len(encoded(self.engine.llm, prompt))
        fits = count + self.sampling.max_tokens <= most
        return "" if fits else f"too long for a context of {most:,} tokens"

    async def ask(self, prompt: Prompt, number: int) -> Answer:
        llm, serving = self.engine.llm, self.engine.serving
        assert serving is not None
        sampling = replace(self.sampling, seed=self.sampling.seed + number)
        begin = time.perf_counter()
        times, emitted, tail, finish = list[float](), list[Any](), "", ""
        try:
            request = llm.request(encoded(llm, prompt), sampling, speculate=self.name == "with")
            async for output in serving.stream(request):
                times.append(time.perf_counter() - begin)
                emitted += output.emitted
                tail, finish = output.tail, output.finish_reason or finish
                if output.stats is not None:
                    self._stats.append(output.stats)
        except EyasError as error:
            lost = not isinstance(error, RequestError)
            return Answer(prompt.key, total=time.perf_counter() - begin, error=str(error), lost=lost)
        runs = [(drafted, "".join(e.text for e in run)) for drafted, run in groupby(emitted, key=lambda e: e.drafted)]
        pieces = (*((text, drafted) for drafted, text in runs if text), *(((tail, False),) if tail else ()))
        return Answer(
            prompt.key,
            first=times[0],
            total=times[-1],
            gaps=tuple(b - a for a, b in pairwise(times)),
            tokens=len(emitted),
            prompt_tokens=len(request.prompt_ids),
            text="".join(text for text, _ in pieces),
            finish=finish,
            ids=tuple(e.token_id for e in emitted),
            pieces=pieces,
        )

    async def before(self) -> None:
        """Forgets the prompts that it has read, or the side that comes second would find them there."""
        assert self.engine.serving is not None
        await self.engine.serving.call(self.engine.llm.engine.forget)
        self.engine.times.clear()
        self._stats.clear()

    async def after(self, before: Any, answers: Sequence[Answer]) -> Heard:
        times = self.engine.times
        spent = dict(zip((*PARTS, STEPS), (times.propose, times.verify, times.rest, times.steps), strict=True))
        if self.engine.llm.target.device.type != "cpu":
            spent = {}  # elsewhere they are the times of launching kernels, not of running them
        parts = [metrics.from_stats(stats) for stats in self._stats]
        drafts = self.name == "with" and self.engine.llm.drafter is not None
        return Heard(metrics.total(parts, "Eyas") if drafts and parts else None, (), spent)

    async def alive(self) -> bool:
        return self.engine.serving is not None

    async def explain(self, prompt: Prompt, mine: Answer, other: Answer) -> Unlike:
        from eyas.engine.lossless import first_difference

        index, serving = first_difference(list(mine.ids), list(other.ids)), self.engine.serving
        assert index is not None and serving is not None
        if self.sampling.temperature:
            return Unlike(None)
        request = self.engine.llm.request(encoded(self.engine.llm, prompt), self.sampling)
        found = await serving.call(lambda: self.engine.comparer.judge(request, list(mine.ids), list(other.ids), index))
        return Unlike(found.gap, found.near_tie)

    async def close(self) -> None:
        self.engine.close()


def encoded(llm: LLM, prompt: Prompt) -> list[int]:
    """Through the chat template; as text for a target that has none."""
    chats = getattr(llm.tokenizer, "chat_template", None)
    return llm.encode(prompt.messages if chats else prompt.text)[0]


def hashed(drafter: str) -> str:
    """Its name, and a digest of its files where it has some."""
    path = Path(drafter)
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    if not path.exists():
        return drafter
    digest = sha256("".join(map(file_hash, files)).encode()).hexdigest()
    return f"{drafter} (SHA-256 {digest[:12]})"


def common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
