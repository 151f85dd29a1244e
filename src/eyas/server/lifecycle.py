"""From the first open port to the last answer: load in the background, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from eyas.core import EyasError
from eyas.engine.serving import settle, tell
from eyas.server.app import make_app
from eyas.server.service import Service
from eyas.server.settings import Settings

if TYPE_CHECKING:
    from eyas.engine.llm import LLM

READY = "The server is fired up and ready to roll!"  # SGLang's words: scripts wait for them
FLUSH = 3  # seconds for last answers to go out, and for the last step of an engine that has to hurry
UNREAD = 60  # seconds in which a caller must take some of what was sent
KEEP_ALIVE = 65  # seconds: longer than the pools of usual clients and proxies keep a connection
logger = logging.getLogger("eyas.server")


class Server(uvicorn.Server):
    """uvicorn without its own idea of signals: it would refuse connections while answers are still being made."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(load: Callable[[], LLM], settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT; a second one does not wait for answers. Raises what ``load`` raises."""
    status = asyncio.run(_serve(load, settings))
    if status is not None:
        # a thread that loads or steps cannot be stopped, and torch does not survive the interpreter's end there
        sys.stderr.flush()
        os._exit(status)


async def _serve(load: Callable[[], LLM], settings: Settings) -> int | None:
    with listening(settings.host, settings.port) as sock:
        stop, loop = Stop(), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        return await run(Service(settings), load, sock, stop)


class Stop:
    """Called once: drain, then end. Called again: end."""

    def __init__(self) -> None:
        self.asked, self.hurried = asyncio.Event(), asyncio.Event()

    def __call__(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


async def run(service: Service, load: Callable[[], LLM], sock: socket.socket, stop: Stop) -> int | None:
    """The server's whole life on ``sock``. Returns None, or an exit status where a thread goes on: 0 for one that still
    loads, 1 for a step that did not end although it had to hurry."""
    server = Server(
        uvicorn.Config(
            make_app(service),
            http="h11",  # comes with uvicorn: what answers does not hang on what else is installed
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=FLUSH,
        )
    )
    serving = asyncio.create_task(server.serve([sock]))
    stopping = asyncio.create_task(stop.asked.wait())
    loading = in_thread(load)
    logger.info("listening url=%s", address(sock))
    try:
        ends: set[asyncio.Future[Any]] = {stopping, serving}
        await asyncio.wait({loading, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            service.open(loading.result())
            logger.info(READY)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        logger.info("draining open_requests=%d", service.open_requests)
    finally:
        await _finish(service, server, serving, stop)
        stopping.cancel()
    if not service.ended:
        logger.error("stopped in the middle of a step that did not end")
        return 1
    logger.info("stopped")
    return None if loading.done() else 0


async def _finish(service: Service, server: Server, serving: asyncio.Task[None], stop: Stop) -> None:
    timeout = service.settings.drain_timeout
    draining = asyncio.create_task(service.drain(timeout))
    hurried = asyncio.create_task(stop.hurried.wait())
    await asyncio.wait({draining, hurried}, timeout=timeout + FLUSH, return_when=asyncio.FIRST_COMPLETED)
    if hurried.done() and not draining.done():
        draining.cancel()
        draining = asyncio.create_task(service.drain(0))
        await asyncio.wait({draining}, timeout=FLUSH)
    for task in (draining, hurried):
        task.cancel()
    server.should_exit = True
    await serving


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises EyasError where the address cannot be had.

    Its connections end when a caller reads nothing for ``UNREAD`` seconds, where the system has that (Linux does): no
    wait of the server's own would see what is in the system's buffers, nor an answer that was sent at once.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise EyasError(f"cannot listen on {host}:{port}: {error.strerror or error}; --port names another.") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD * 1000))
    return sock


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def in_thread(load: Callable[[], LLM]) -> asyncio.Future[LLM]:
    """In a thread that nobody waits for: who is told to end while a target is loaded does so at once."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[LLM] = loop.create_future()

    def work() -> None:
        try:
            result = load()
        except BaseException as error:
            tell(loop, settle, future, None, error)
        else:
            tell(loop, settle, future, result, None)

    threading.Thread(target=work, name="eyas-loading", daemon=True).start()
    return future
