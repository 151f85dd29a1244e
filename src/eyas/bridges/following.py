"""A server that runs as a child: its log line by line, ready and dead told apart at once, and nothing left of it.

The child begins a session of its own, so that a terminal's Ctrl-C reaches it once and through us. Whatever it starts
stays below this process even where its parent ends first or it begins another session (Linux: child subreaper), so all
of it can be found and ended. Where this process is killed, guard.py ends the child's session.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import math
import os
import re
import selectors
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import psutil

from eyas.bridges.failures import Tracebacks
from eyas.core import EyasError

_TICK = 0.2  # seconds between looks at the child
_PATIENCE = 10.0  # that an engine which said it is failing, or is told to end while it loads, has to end by itself
_GRACE = 5.0  # that what is left has to end before it is killed
_ANSWER = 30.0  # for the health endpoint: SGLang's makes a token
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_PIECES = re.compile(rb"([^\r\n]*)(\r\n|\n|\r(?!\Z))")  # a \r at the end may be half of \r\n
_PERCENT = re.compile(r"\b(\d{1,3})%")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Address:
    """Where the server answers, as seen from here."""

    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}"


@dataclass(frozen=True)
class Signs:
    """What an engine's log says. ``ready`` None: it was told not to say it, so the health endpoint alone decides.

    ``header`` is what comes before a message, with the group "process"; ``ready`` and ``fatal`` match where the message
    begins, since requests that are logged may hold any text. ``stages``: a pattern and what begins with it.
    """

    header: re.Pattern[str]
    stages: tuple[tuple[str, str], ...]
    ready: re.Pattern[str] | None
    fatal: re.Pattern[str]


@dataclass(frozen=True)
class Line:
    text: str


@dataclass(frozen=True)
class Stage:
    what: str
    done: float | None = None  # from 0 to 1, where it is known


@dataclass(frozen=True)
class Ready:
    seconds: float  # from the start of the process to its health endpoint's yes


@dataclass(frozen=True)
class Stopping:
    """A signal was passed on."""

    signal: int


@dataclass(frozen=True)
class Ended:
    """``code`` as Popen has it: negative for a signal. ``asked``: the signal that it was sent by us, if any.

    ``failing``: it said that it was; ``hung``: and did not end. ``left``: processes that had to be ended behind it.
    """

    code: int
    seconds: float
    was_ready: bool
    asked: int | None
    failing: bool
    hung: bool
    traceback: str
    tail: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether nobody wanted it to end."""
        return self.asked is None and (self.failing or self.code != 0 or not self.was_ready)


Event = Line | Stage | Ready | Stopping | Ended


@dataclass
class Server:
    """Start it by entering it, and go through its events; leaving it ends whatever still runs.

    ``log`` gets the child's bytes as they come. Raises EyasError where the program cannot be started, and where the
    log cannot be written: the child ends with it.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    signs: Signs
    address: Address
    log: BinaryIO | None = None  # unbuffered

    def __post_init__(self) -> None:
        self.asked: int | None = None  # the signal that was passed on, first at this time
        self._asked_at = math.inf
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._cleanup = contextlib.ExitStack()
        self._selector = selectors.DefaultSelector()
        self._rest, self._open = b"", True
        self._tail, self._tracebacks = deque[str](maxlen=400), Tracebacks(self.signs.header)
        self._stage: Stage | None = None
        self._ready, self._failing = False, math.inf  # since when
        self._listening, self._healthy, self._over = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> Server:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self._cleanup.enter_context(self._selector)
        self._cleanup.enter_context(_subreaper())
        self._cleanup.enter_context(self._signals_passed_on())
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                list(self.command),
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise EyasError(f"{self.command[0]} cannot be started: {error}") from error
        assert self._process.stdout is not None
        self._pipe = self._cleanup.enter_context(self._process.stdout)
        self._selector.register(self._pipe, selectors.EVENT_READ)
        guard = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(self.pid), str(_GRACE)]
        self._guard = subprocess.Popen(
            guard,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self.asked is not None:  # while it was being started
            self._send(self.asked)
        if self.signs.ready is None:
            self._listening.set()
        threading.Thread(target=self._watch_health, daemon=True).start()

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._listening.set()
        try:
            if self._process is not None:
                self._end()
                self._process.wait()
        finally:
            if self._guard is not None:
                self._guard.kill()
                self._guard.communicate()
            self._cleanup.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "it runs inside a with statement"
        return self._process.pid

    def events(self) -> Iterator[Event]:
        """What happens, as it happens. The last one is Ended."""
        assert self._process is not None, "it runs inside a with statement"
        hung = deaf = stopping = False
        running = True
        while running and not (hung or deaf):
            running = self._process.poll() is None  # before it is heard, so that nothing it did is missed
            yield from self._hear(_TICK)
            if self.asked is not None and not stopping:
                stopping = True
                yield Stopping(self.asked)
            if self._healthy.is_set() and not self._ready and self.asked is None and self._failing == math.inf:
                self._ready = True
                self._tracebacks.forget()
                yield Ready(time.monotonic() - self._began)
            hung, deaf = running and self._hangs(), running and self._is_deaf()
        deadline = time.monotonic() + (0 if hung or deaf else _GRACE)
        while (self._left() or self._open) and time.monotonic() < deadline:
            yield from self._hear(_TICK)  # what the others still have to say
        left = self._end()
        yield from self._hear(0)
        yield Ended(
            code=self._process.wait(),
            seconds=time.monotonic() - self._began,
            was_ready=self._ready,
            asked=self.asked,
            failing=self._failing != math.inf,
            hung=hung,
            traceback=self._tracebacks.root(),
            tail=tuple(self._tail),
            left=() if hung else tuple(left),
        )

    def _hangs(self) -> bool:
        """Whether it said that it fails, had time to end, and neither ended nor works all the same."""
        if self.asked is not None or time.monotonic() < self._failing + _PATIENCE:
            return False
        if self._ready and healthy(self.address, _GRACE):
            self._failing = math.inf  # one of several, or a line that only looked like it
            return False
        return True

    def _is_deaf(self) -> bool:
        """Whether it was told to end before it was ready, and goes on: vLLM looks at signals once it has loaded."""
        return not self._ready and time.monotonic() > self._asked_at + _PATIENCE

    # The log

    def _hear(self, seconds: float) -> Iterator[Event]:
        if not self._open:
            self._over.wait(seconds)
            return
        while self._selector.select(seconds):
            chunk = os.read(self._pipe.fileno(), 1 << 16)
            if self.log is not None:
                try:
                    written = memoryview(chunk)
                    while written:  # an unbuffered file may take a part only
                        written = written[self.log.write(written) :]
                except OSError as error:
                    raise EyasError(f"the log cannot be written to {self.log.name}: {error.strerror}") from error
            if not chunk:
                self._selector.unregister(self._pipe)
                self._open = False
                chunk = b"\n" if self._rest else b""
            self._rest += chunk
            end = 0
            for piece in _PIECES.finditer(self._rest):
                end = piece.end()
                yield from self._heard(piece[1].decode("utf-8", "replace"), piece[2] != b"\r")
            self._rest = self._rest[end:]
            if seconds or not self._open:
                return  # the child is looked at between chunks

    def _heard(self, text: str, whole: bool) -> Iterator[Event]:
        """``whole``: a line, not one state of a progress bar."""
        text = _ANSI.sub("", text)
        found = self.signs.header.match(text)
        message = text[found.end() :] if found else text
        yield from self._staged(text)
        if not whole:
            return
        if self.signs.ready is not None and self.signs.ready.match(message):
            self._listening.set()
        if self.asked is None and self._failing == math.inf and self.signs.fatal.match(message):
            self._tracebacks.mark()
            self._failing = time.monotonic()
        self._tail.append(text)
        self._tracebacks.feed(text)
        yield Line(text)

    def _staged(self, text: str) -> Iterator[Stage]:
        what = next((what for pattern, what in self.signs.stages if re.search(pattern, text)), None)
        if what is None or self._ready:
            return
        percent = _PERCENT.search(text)
        new = Stage(what, min(int(percent[1]), 100) / 100 if percent else None)
        if new != self._stage:
            self._stage = new
            yield new

    def _watch_health(self) -> None:
        self._listening.wait()
        while not self._over.is_set() and not self._healthy.is_set():
            if healthy(self.address):
                self._healthy.set()
            self._over.wait(2 * _TICK)

    # Its end

    @contextlib.contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can be told
            return
        heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup stays nohup
        before = {number: signal.signal(number, self._pass_on) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The first one goes to the engine, a second one kills it."""
        again, self.asked = self.asked is not None, self.asked or number
        self._asked_at = min(self._asked_at, time.monotonic())
        if self._process is not None:
            self._send(signal.SIGKILL if again else number)

    def _send(self, number: int) -> None:
        """Ctrl-C and kills to all of its processes, as from a terminal; to end politely is told to the first alone.

        It finishes what it has begun with the others' help; SGLang's schedulers have no handler of their own.
        """
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            if number in (signal.SIGTERM, signal.SIGHUP):
                self._process.send_signal(signal.SIGTERM)
            else:
                os.killpg(self.pid, number)

    def _left(self) -> list[psutil.Process]:
        """What runs of the engine. Those that ended and have nobody else are reaped on the way."""
        known = self._before | ({self._guard.pid} if self._guard else set())
        found = []
        for process in psutil.Process().children(recursive=True):
            if process.pid in known:
                continue
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
                elif process.ppid() == os.getpid() and process.pid != self.pid:
                    os.waitpid(process.pid, os.WNOHANG)
        return found

    def _end(self) -> list[str]:
        """Ends what still runs, and says what that was. Raises EyasError for what cannot be killed."""
        left = self._left()
        names = [describe(process) for process in left]
        _send_all(left, signal.SIGTERM)
        self._wait_until_gone(_GRACE)
        deadline = time.monotonic() + 4 * _GRACE
        while left := self._left():
            _send_all(left, signal.SIGKILL)
            self._wait_until_gone(1)
            if time.monotonic() > deadline:  # in the kernel, where no signal reaches them
                stuck = ", ".join(str(process.pid) for process in left)
                raise EyasError(f"processes {stuck} of the engine do not end, not even when killed: look at dmesg")
        return names

    def _wait_until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._left() and time.monotonic() < deadline:
            if self._process is not None:
                self._process.poll()
            time.sleep(0.05)


def _send_all(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def describe(process: psutil.Process) -> str:
    """ "4711 (VLLM::EngineCore)": its number and how it calls itself."""
    try:
        words = " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        words = "ended meanwhile"
    return f"{process.pid} ({words if len(words) <= 100 else words[:100] + ' ...'})"


def healthy(address: Address, seconds: float = _ANSWER) -> bool:
    """Whether GET /health is answered with 200. A certificate may be anyone's: the server is ours."""
    connection = (
        http.client.HTTPSConnection(
            address.host, address.port, timeout=seconds, context=ssl._create_unverified_context()
        )
        if address.tls
        else http.client.HTTPConnection(address.host, address.port, timeout=seconds)
    )
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Processes below this one whose parent ends become its children, not those of init. Linux only."""
    if not sys.platform.startswith("linux"):
        yield
        return
    set_it, get_it = 36, 37  # PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(get_it, ctypes.byref(before))
    libc.prctl(set_it, 1)
    try:
        yield
    finally:
        libc.prctl(set_it, before.value)
