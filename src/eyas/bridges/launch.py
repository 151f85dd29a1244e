"""A server of SGLang or vLLM with EAGLE-3, from what was asked for to what is run.

``plan`` reads and decides, ``prepare`` writes what the plan needs (into the cache folder only), and following.Server
runs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from eyas import __version__, progress
from eyas.bridges import converting, holders, plugin
from eyas.bridges.check import check
from eyas.bridges.code.source import EngineSource, open_engine
from eyas.bridges.failures import COMMON, Diagnosis, diagnose, exception_of, failing_lines
from eyas.bridges.flags import Given, read_flags
from eyas.bridges.following import Address, Ended, Signs
from eyas.bridges.report import Problem, Report
from eyas.bridges.sglang import launch as sglang
from eyas.bridges.target import open_target
from eyas.bridges.vllm import launch as vllm
from eyas.core import EyasError, UsageError, one_line
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.convert import convert
from eyas.drafter.dialects import for_target, read
from eyas.drafter.verifier import Verifier
from eyas.target.smollm2 import cache_folder

# Run by the engine's own Python: where it has the engine, without importing it, and what is installed under a name.
_LOOK = """
import importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
spec = importlib.util.find_spec(sys.argv[1])
origin = spec and spec.origin
print(json.dumps({"origin": origin, "version": version(sys.argv[1]), "plugin": version("eyas-plugin")}))
"""


@dataclass(frozen=True)
class Asked:
    """``arguments`` are the engine's own. ``python`` None is the one that runs this."""

    engine: str
    target: str
    drafter: str | Path
    arguments: tuple[str, ...] = ()
    python: str | Path | None = None
    check: bool = True
    plugin: bool = True
    share_gpus: bool = False


@dataclass(frozen=True)
class Conversion:
    """The drafter in the engine's dialect, in ``place``, perhaps since an earlier launch. ``why``: what it cures."""

    source: Path
    dialects: tuple[str, str]  # from, to
    place: Path
    why: tuple[Problem, ...]


@dataclass(frozen=True)
class Plan:
    """What would be run. ``variables`` come on top of ``environment``; ``notes`` say what Eyas chose.

    ``supplied``: what is wrong with the pair and put right by the plugin. ``plugin_asks``: for which class, "" without;
    ``plugin_path``: where it has to be put, None where the engine's environment has it.
    """

    asked: Asked
    source: EngineSource
    target: Path
    command: tuple[str, ...]
    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)
    report: Report | None = None
    supplied: tuple[Problem, ...] = ()
    conversion: Conversion | None = None
    plugin_asks: str = ""
    plugin_path: Path | None = None
    markers: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def address(self) -> Address:
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bound, self.bound)
        return Address(host, _port(self.flags, _engine(self.asked).PORT), "ssl_keyfile" in self.flags)

    @property
    def bound(self) -> str:
        """The interface it listens at, "" for all of them."""
        return _engine(self.asked).host(self.flags)

    @property
    def signs(self) -> Signs:
        return _engine(self.asked).signs(self.flags, self.environment)

    @property
    def line(self) -> str:
        """For a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.command)])


def _port(flags: Mapping[str, Any], default: int) -> int:
    given = flags.get("port", default)
    if type(given) is not int or not 0 < given < 65536:
        raise UsageError(f"--port {given}: expected a number from 1 to 65535")
    return given


@dataclass(frozen=True)
class Installed:
    """An engine in an environment: the folder that its package lies in, and versions of distributions, "" without.

    ``version`` is that of the distribution called like the package; vLLM for CPUs is installed under another name.
    """

    place: Path
    version: str
    plugin: str


class DoesNotFitError(EyasError):
    """The check found what a launch cannot put right."""

    def __init__(self, report: Report, wrong: Sequence[Problem]):
        count = f"{len(wrong)} problem{'' if len(wrong) == 1 else 's'}"
        super().__init__(f"not started: {count} that eyas launch cannot put right; --no-check starts it all the same")
        self.report = report


def plan(asked: Asked, environment: Mapping[str, str] | None = None) -> Plan:
    """Everything that would be done, without doing it.

    Raises UsageError for what cannot be launched at all, DoesNotFitError for a pair that would fail or silently
    misbehave whatever is done here, and CheckpointError for a drafter that cannot be read.
    """
    environment = dict(os.environ if environment is None else environment)
    engine = _engine(asked)
    python = find_python(asked.python)
    installed = find_engine(asked.engine, python, environment)
    source, target = open_engine(asked.engine, installed.place), open_target(asked.target)
    drafter, given = Checkpoint.open(asked.drafter).path, Given.read(asked.arguments, engine.READ)

    def with_drafter(drafter: Path) -> Plan:
        ours, rest = engine.arguments(target.folder, drafter, given)
        known = {**given.file, **read_flags(rest), **read_flags(ours)}
        command = (str(python), "-m", *engine.program(target.folder, bool(installed.version)), *ours, *rest)
        notes = tuple(engine.notes(known, given, environment))
        return Plan(asked, source, target.folder, command, known, environment, notes=notes)

    found = with_drafter(drafter)
    if name := next((name for name in engine.UNFOLLOWED if found.flags.get(name)), ""):
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(
            f"eyas launch cannot follow a server with {flag}, which has no HTTP health endpoint of its own"
        )
    if asked.check:
        report, wrong = _look(found, drafter)
        if wrong:
            conversion = _conversion(found, drafter, report, wrong)
            found = replace(with_drafter(conversion.place), conversion=conversion)
            report = _fit(found, conversion.place) if conversion.place.is_dir() else report
        found = replace(found, report=report, supplied=tuple(_supplied(asked, report)))
    variables = {"PYTHONUNBUFFERED": "1"}
    if asked.plugin:
        found = replace(
            found,
            plugin_asks=",".join(dict.fromkeys(filter(None, (environment.get(plugin.ASKED), target.architecture))))
            or "auto",
            plugin_path=None if installed.plugin == __version__ else plugin.place(),
            markers=cache_folder() / "launches" / f"{os.getpid()}-{time.time_ns()}",
        )
        variables |= _plugin_variables(found)
    return replace(found, variables=variables)


def _engine(asked: Asked) -> ModuleType:
    return {"sglang": sglang, "vllm": vllm}[asked.engine]


def find_python(asked: str | Path | None) -> Path:
    """A Python by its path, or that of an environment's folder. Raises UsageError where there is none."""
    if asked is None:
        return Path(sys.executable)
    place = Path(asked).expanduser()
    path = place / "bin" / "python" if place.is_dir() else place
    if path.is_file() and os.access(path, os.X_OK):
        return path.absolute()  # not resolved: an environment's Python is a link that knows where it lies
    raise UsageError(f"--engine-python {asked}: no Python there; name an environment's folder or its bin/python")


def find_engine(name: str, python: Path, environment: Mapping[str, str]) -> Installed:
    """The engine that ``python`` would import. Raises UsageError where there is none."""
    try:
        ran = subprocess.run(
            [str(python), "-c", _LOOK, name], env=dict(environment), capture_output=True, text=True, timeout=120
        )
        said = json.loads(ran.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{python} does not run as a Python: {one_line(error)}") from error
    if not said["origin"]:
        raise UsageError(f"{python} has no {name}; --engine-python names the Python of an environment that has it")
    return Installed(Path(said["origin"]).parent.parent, said["version"], said["plugin"])


# Whether it can work


def _look(plan: Plan, drafter: Path) -> tuple[Report, list[Problem]]:
    """What the check says, and what of it neither the plugin nor the user has put right."""
    report = check(plan.target, drafter, plan.source, plan.flags, plan.environment)
    supplied = _supplied(plan.asked, report)
    return report, [p for p in report.problems if p.severity in ("fails", "silent") and p not in supplied]


def _fit(plan: Plan, drafter: Path) -> Report:
    report, wrong = _look(plan, drafter)
    if wrong:
        raise DoesNotFitError(report, wrong)
    return report


def _supplied(asked: Asked, report: Report) -> list[Problem]:
    """The problems that the plugin takes care of."""
    bad = [p for p in report.problems if p.severity in ("fails", "silent")] if asked.plugin else []
    cured = [problem for problem in bad if problem.plugin == "cures"]
    return cured + [problem for problem in bad if cured and problem.plugin == "completes"]


def _conversion(plan: Plan, drafter: Path, report: Report, wrong: Sequence[Problem]) -> Conversion:
    """Raises DoesNotFitError where it would not help: the drafter has the engine's dialect, cannot be written in it, or
    is not at fault.
    """
    checkpoint = Checkpoint.open(drafter)
    reading = for_target(read(checkpoint), open_target(plan.target).layers)
    dialects = (reading.dialect, _engine(plan.asked).DIALECT)
    if dialects[0] == dialects[1] or any(problem.plugin for problem in wrong):
        raise DoesNotFitError(report, wrong)
    if refused := list(converting.refusals(checkpoint, reading, dialects[1], plan.source)):
        said = {problem.evidence for problem in wrong}
        more = [problem for problem in refused if problem.evidence not in said]
        report.problems = replace(report, problems=[*report.problems, *more]).sorted_problems()
        raise DoesNotFitError(report, [*wrong, *more])
    files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    engine = f"{plan.source.name}-{re.sub(r'[^0-9A-Za-z.+-]', '-', plan.source.version) or 'unknown'}"
    facts = [__version__, engine, str(plan.target), str(checkpoint.path), json.dumps(checkpoint.config, sort_keys=True)]
    facts += [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    name = f"{checkpoint.folder.name}-{engine}-{hashlib.sha256(chr(10).join(facts).encode()).hexdigest()[:12]}"
    return Conversion(drafter, dialects, cache_folder() / "drafters" / name, tuple(wrong))


# What it needs


def _plugin_variables(plan: Plan) -> dict[str, str]:
    found = {plugin.ASKED: plan.plugin_asks, plugin.MARKERS: str(plan.markers)}
    if plan.plugin_path is not None:
        paths = [str(plan.plugin_path), *filter(None, [plan.environment.get("PYTHONPATH")])]
        found["PYTHONPATH"] = os.pathsep.join(paths)
    return found | _engine(plan.asked).plugin_variables(plan.source, plan.environment)


def prepare(plan: Plan, report: progress.Report = lambda what, done: None) -> Plan:
    """Converts the drafter and lays out the plugin, where the plan says so and it was not done before.

    Raises CheckpointError where the drafter cannot be converted, and DoesNotFitError where that did not help.
    """
    conversion = plan.conversion
    if conversion is not None and not conversion.place.is_dir():
        report(f"converting the drafter for {plan.asked.engine}", None)
        target = Verifier.read(plan.target)
        convert(conversion.source, conversion.dialects[1], conversion.place, target=target, engine=plan.source.find)
        plan = replace(plan, report=_fit(plan, conversion.place))
    if plan.plugin_path is not None and not plan.plugin_path.is_dir():
        plugin.lay_out(plan.plugin_path)
    if plan.markers is not None:
        for earlier in plan.markers.parent.glob("*-*"):
            if not psutil.pid_exists(int(earlier.name.partition("-")[0])):
                shutil.rmtree(earlier, ignore_errors=True)
        plan.markers.mkdir(parents=True)
    return plan


def check_free(plan: Plan) -> None:
    """Raises EyasError where its port or its GPUs are taken, and names by whom."""
    holders.check_port(plan.address, plan.bound)
    if not (plan.asked.share_gpus or plan.source.requires("torch").endswith("+cpu")):
        holders.check_gpus(_engine(plan.asked).gpus(plan.flags), plan.environment)


# What came of it


def plugin_said(plan: Plan) -> plugin.Said | None:
    """What the plugin did in this launch; None where it was not asked for."""
    if plan.markers is None:
        return None
    return plugin.said(plan.markers, plan.plugin_asks, [problem.evidence for problem in plan.supplied])


def forget(plan: Plan) -> None:
    """Removes the marks of a launch that is over."""
    if plan.markers is not None:
        shutil.rmtree(plan.markers, ignore_errors=True)


def explain(plan: Plan, ended: Ended) -> Diagnosis:
    """Why it failed, and what to do."""
    if ended.code == -signal.SIGKILL and not (ended.failing or ended.hung):
        return _by_signal(signal.SIGKILL)  # whatever tracebacks it had shown before, it was not these that ended it
    signs = plan.signs
    tail = failing_lines(ended.tail, signs.header, signs.fatal) if ended.was_ready else ended.tail
    texts = (ended.traceback, "\n".join(tail))
    if found := diagnose((*_engine(plan.asked).KNOWN, *COMMON), texts):
        return found
    if ended.code < 0 and not ended.hung:
        return _by_signal(-ended.code)
    unchecked = "" if plan.asked.check else "start it without --no-check, which says what does not fit; or "
    alone = f"{unchecked}run the target without its drafter: where that fails too, it is not speculation"
    if exception := exception_of(ended.traceback):
        return Diagnosis(f"no failure that Eyas knows: {exception}", alone)
    where = "before it was ready" if not ended.was_ready else "while it served"
    return Diagnosis(f"it ended {where} with exit code {ended.code}, and shows no traceback", alone)


def _by_signal(number: int) -> Diagnosis:
    if number == signal.SIGKILL:
        return Diagnosis(
            "it was killed (SIGKILL): mostly the kernel does that, when the machine's memory is full",
            "dmesg -T | grep -i oom shows it; give it more memory, or start fewer processes on this machine",
        )
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return Diagnosis(
        f"it was ended by {name}" + (", a crash in compiled code" if number in _CRASHES else ""),
        "look for the native stack in its log; kernels built for another GPU, driver or PyTorch end like this"
        if number in _CRASHES
        else "somebody sent it that signal: look at who ends processes on this machine",
    )


_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def exit_code(ended: Ended) -> int:
    """The child's own once it was ready, as a shell says it; before that 1, or 128 and the signal that stopped it."""
    own = ended.code if ended.code >= 0 else 128 - ended.code
    if not ended.was_ready:
        return 128 + ended.asked if ended.asked is not None else 1
    return max(own, 1) if ended.failed else own
