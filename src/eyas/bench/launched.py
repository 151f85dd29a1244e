"""Engines that the judge itself starts: the same command with a drafter and without, side by side or one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eyas.bench.client import Endpoint
from eyas.bench.facts import Facts
from eyas.bench.grid import Contender, sglang_shape
from eyas.bench.passes import Answer, BenchError, Name
from eyas.bench.sides import EndpointSide, Say, Unlike, quiet
from eyas.bench.workload import Prompt
from eyas.bridges import launch
from eyas.bridges.flags import Given
from eyas.bridges.following import Ended, Ready, Server, Stage
from eyas.bridges.holders import free_port
from eyas.bridges.launch import Asked, DoesNotFitError, Plan
from eyas.core import DraftShape, EyasError, SamplingParams, UsageError

CAP = 48  # requests that SGLang runs where it speculates, unless told otherwise
LEAVING = 30.0  # seconds that an engine has to end once it was told to
TICK = 0.2
OURS = ("port", "host")
# vLLM tells its settings and empties its prefix cache in this mode only; it listens on this machine only.
DEVELOPING = {"vllm": {"VLLM_SERVER_DEV_MODE": "1"}, "sglang": dict[str, str]()}


def planned(asked: Asked, one: Contender, running: int) -> Plan:
    """What is run: ``asked`` in this way, at a port of this machine. ``running``: requests at a time, at most.

    Raises UsageError for what cannot be launched like that, BenchError for a pair that does not fit.
    """
    own = [*asked.arguments, *one.variant.flags]
    given = [part.partition("=")[0].lstrip("-").replace("_", "-") for part in own if part[:2] == "--"]
    for name in OURS:
        if name in given:
            raise UsageError(f"--{name} is chosen by the judge, which starts the engine on this machine: leave it out.")
    flags = [*own, "--host", "127.0.0.1", "--port", str(free_port())]
    if asked.engine == "sglang":
        flags += ["--enable-metrics"] if "enable-metrics" not in given else []
        if "max-running-requests" not in given:
            flags += ["--max-running-requests", str(max(CAP, running))]
    if one.shape and asked.engine == "vllm":
        if one.shape.eagle_topk > 1:
            raise UsageError("vLLM drafts chains only: leave out --speculative-eagle-topk.")
        flags += ["--spec-tokens", str(one.shape.num_steps)]
    elif one.shape:
        flags += sglang_shape(one.shape)
    environment = {**os.environ, **DEVELOPING[asked.engine], **dict(one.variant.variables)}
    try:
        found = launch.plan(replace(asked, arguments=tuple(flags)), environment)
        return plainly(found) if one.plain else found
    except DoesNotFitError as error:
        wrong = [p.evidence for p in error.report.problems if p.severity in ("fails", "silent")]
        raise BenchError(
            f"This pair does not fit {asked.engine} (--no-check starts it all the same): {'; '.join(wrong)}."
        ) from error


def plainly(found: Plan) -> Plan:
    """The same command without its drafter. All speculative flags begin alike: of vLLM's spellings a plan makes one.

    Raises UsageError where a file behind --config says how to draft.
    """
    for name in Given.read(found.asked.arguments, ()).file:
        if name.startswith("speculative"):
            flag = name.replace("_", "-")
            raise UsageError(f"--config: {flag} in the file holds without speculation too: give it as an argument.")
    command, dropped = list[str](), False
    for part in found.command:
        if part.startswith("-"):
            dropped = part.startswith("--speculative")
        if not dropped:
            command.append(part)
    flags = {name: value for name, value in found.flags.items() if not name.startswith("speculative")}
    return replace(found, command=tuple(command), flags=flags, conversion=None)


class Launched:
    """A server that a thread follows from its start to its end. Its log goes to the end of a file."""

    def __init__(self, plan: Plan, log: Path):
        self.plan, self.stage, self.ready, self.ended = plan, "", False, False
        self.why = ""  # it ended
        self._log, self._begun = log, threading.Event()
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._follow, name="eyas-launched")

    def start(self) -> None:
        """Raises EyasError where its port or its GPUs are taken."""
        launch.check_free(self.plan)
        self.plan = launch.prepare(self.plan)
        self._thread.start()
        self._begun.wait()

    def stop(self) -> None:
        """Ends it politely, then not; nothing of it is left."""
        try:
            if self._server is not None and not self.ended:
                self._server.asked = signal.SIGTERM
                os.kill(self._server.pid, signal.SIGTERM)
                self._thread.join(LEAVING)
        except ProcessLookupError:  # it has just ended
            pass
        finally:
            if self._server is not None and self._thread.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._server.pid, signal.SIGKILL)
            if self._thread.ident is not None:
                self._thread.join()
            launch.forget(self.plan)

    def _follow(self) -> None:
        environment = {**self.plan.environment, **self.plan.variables}
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with (
                self._log.open("ab", buffering=0) as file,
                Server(self.plan.command, environment, self.plan.signs, self.plan.address, file) as server,
            ):
                self._server = server
                self._begun.set()
                for event in server.events():
                    self._heard(event)
        except (EyasError, OSError) as error:
            self.why = str(error)
        finally:
            self.ended = True
            self._begun.set()

    def _heard(self, event: object) -> None:
        if isinstance(event, Stage):
            self.stage = event.what
        elif isinstance(event, Ready):
            self.ready = True
        elif isinstance(event, Ended) and event.asked is None:
            said = launch.explain(self.plan, event)
            self.why = f"{said.what} (fix: {said.fix}; log: {self._log})"


@dataclass
class LaunchedSide(EndpointSide):
    """A side whose server it starts itself. ``rivals`` do not fit beside it: they are ended before it starts."""

    endpoint: Endpoint = field(init=False)
    plan: Plan = field(kw_only=True)
    log: Path = field(kw_only=True)
    model: str | None = None
    completions: bool = False
    rivals: Sequence[LaunchedSide] = field(default=(), repr=False)
    server: Launched | None = field(default=None, init=False)

    async def start(self, report: Say = quiet) -> Facts:
        """Anew, where it runs already. Raises BenchError where it does not start, and says why."""
        for side in (*self.rivals, self):
            await side.close()
        self.server = Launched(self.plan, self.log)
        self.server.start()
        said = None
        while not (self.server.ready or self.server.ended):
            if said != (said := self.server.stage):
                report(f"starting {self.plan.source.label} {self.name} speculation{f': {said}' if said else ''}")
            await asyncio.sleep(TICK)
        if self.server.ended:
            why = self.server.why
            await self.close()
            raise BenchError(f"{self.plan.source.label} does not start {self.name} speculation: {why}")
        self.endpoint = Endpoint(self.plan.address.url, model=self.model, completions=self.completions)
        return await super().start()

    async def room(self, prompt: Prompt) -> str:
        if not self.surely_fits(prompt):
            await self._up()
        return await super().room(prompt)

    async def ask(self, prompt: Prompt, number: int) -> Answer:
        answer = await super().ask(prompt, number)
        if not answer.lost or (server := self.server) is None:
            return answer
        deadline = time.monotonic() + LEAVING  # its end is heard of a little later than the connection's
        while not server.ended and time.monotonic() < deadline and not await self.alive():
            await asyncio.sleep(TICK)
        return replace(answer, error=server.why) if server.ended and server.why else answer

    async def explain(self, prompt: Prompt, mine: Answer, other: Answer) -> Unlike:
        await self._up()
        return await super().explain(prompt, mine, other)

    async def close(self) -> None:
        if hasattr(self, "endpoint"):
            await self.endpoint.close()
            del self.endpoint
        if self.server is not None:
            self.server.stop()
            self.server = None

    async def _up(self) -> None:
        if self.server is None:
            await self.start()


def both(
    asked: Asked,
    shape: DraftShape | None,
    sampling: SamplingParams,
    *,
    side_by_side: bool | None,
    running: int,
    log: Path,
    model: str | None = None,
    completions: bool = False,
    seeded: bool = False,
) -> tuple[dict[Name, LaunchedSide], bool]:
    """One engine launched both ways, and whether one at a time. Side by side by default where it computes on a CPU."""

    def side(name: Name, one: Contender) -> LaunchedSide:
        return LaunchedSide(
            name,
            sampling=sampling,
            seeded=seeded,
            plan=planned(asked, one, running),
            log=log.with_suffix(f".{name}.log"),
            model=model,
            completions=completions,
        )

    without, with_ = side("without", Contender()), side("with", Contender(shape, auto=shape is None))
    if side_by_side is None:
        torch = with_.plan.source.requires("torch")
        side_by_side = torch.endswith("+cpu") or with_.plan.flags.get("device") == "cpu"
    alone = not side_by_side
    if alone:
        without.rivals, with_.rivals = (with_,), (without,)
    elif not asked.share_gpus:  # each is the other's neighbour on the GPUs: who else is there is asked once, for both
        launch.check_free(without.plan)
        for one in (without, with_):
            one.plan = replace(one.plan, asked=replace(one.plan.asked, share_gpus=True))
    return {"without": without, "with": with_}, alone
