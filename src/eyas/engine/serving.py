"""The engine for many callers at once: one thread steps it, coroutines add requests and hear of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

from eyas.core import EyasError, Request, RequestError, StructuredOutputsParams

if TYPE_CHECKING:  # a server opens its port before it imports torch, which takes seconds
    from eyas.engine.llm import LLM
    from eyas.engine.sequence import Output

Listener: TypeAlias = "Callable[[Output | EyasError], None]"
Command = Callable[[], None]
logger = logging.getLogger("eyas.engine")


class AsyncLLM:
    """Serves an LLM, whose engine belongs to a thread of this object's from now on, until ``close``.

    A caller who stops listening, by cancellation or by leaving the loop, frees its request's memory at once.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}  # touched by the engine's thread only
        self._closed = False
        self._compiling = ThreadPoolExecutor(1, "eyas-compile")  # one: constraints are compiled one after another
        self._thread = threading.Thread(target=self._run, name="eyas-engine", daemon=True)
        self._thread.start()

    async def stream(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yields what becomes of a request. Raises its error, or RequestError where it cannot be served."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Output | EyasError] = asyncio.Queue()

        def hear(news: Output | EyasError) -> None:
            tell(loop, inbox.put_nowait, news)

        if request.sampling.structured_outputs is not None:
            await self.compile(request.sampling.structured_outputs)
        self._send(lambda: self._add(request, hear))
        try:
            while True:
                news = await inbox.get()
                if isinstance(news, EyasError):
                    raise news
                if news.error is not None:
                    raise news.error
                yield news
                if news.finish_reason is not None:
                    return
        finally:
            self._commands.put(lambda: self._drop(request.id, hear))

    async def compile(self, constraint: StructuredOutputsParams) -> None:
        """Has a constraint ready before it is needed, in a thread of its own: nobody waits for those of others.

        Raises RequestError for what cannot be one.
        """
        grammars = self.llm.engine.grammars
        if grammars.known(constraint) is None:
            await asyncio.get_running_loop().run_in_executor(self._compiling, grammars.compile, constraint)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Runs something between two steps: whatever reads or changes the engine has to."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                result, error = function(), None
            except Exception as caught:
                result, error = None, caught
            tell(loop, settle, future, result, error)

        self._send(run)
        return await future

    @property
    def closed(self) -> bool:
        """Whether nothing is answered any more: it was told to end, or its thread has died."""
        return self._closed

    @property
    def ended(self) -> bool:
        """Whether the thread is gone: closing waits for the step that is running."""
        return not self._thread.is_alive()

    def close(self, wait: bool = True) -> None:
        """Ends all requests with an error, and the thread."""
        self._closed = True
        self._commands.put(lambda: None)
        if wait:
            self._thread.join()

    def _send(self, command: Command) -> None:
        """Queues a command. The engine's thread obeys all that were queued before it was told to end."""
        self._commands.put(command)
        if self._closed:
            raise EyasError("The engine is closed: no request can be answered any more.")

    # The engine's thread

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # nobody waits for a thread that is gone
            self._closed = True
            closed = EyasError("The engine was closed before the answer was complete.")
            self._tell_all(closed)  # first: what is told to leave now finds nothing to take out of a broken engine
            self._obey(wait=False)
            self._tell_all(closed)
            self.llm.engine.reset()

    def _serve(self) -> None:
        engine = self.llm.engine
        while not self._closed:
            self._obey(wait=engine.idle)
            try:
                outputs = [] if engine.idle else engine.step(self._tell)
            except Exception as error:  # a fault of the engine itself, which knows what it could not lay at any door
                self._tell_all(fault(error))
                engine.reset()  # where not even this is possible, the thread ends
                continue
            self._tell(outputs)

    def _tell(self, outputs: list[Output]) -> None:
        for output in outputs:
            if (listener := self._listeners.get(output.request_id)) is not None:
                listener(output)
                if output.finish_reason is not None:
                    del self._listeners[output.request_id]

    def _obey(self, wait: bool) -> None:
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except queue.Empty:
            pass

    def _add(self, request: Request, hear: Listener) -> None:
        try:
            self.llm.engine.add(request)
        except EyasError as error:
            hear(error)
        except (TypeError, ValueError) as error:  # nonsense where token ids should be: no reason to end everybody else
            hear(RequestError(f"This request makes no sense ({type(error).__name__}: {error})."))
        except Exception as error:
            hear(fault(error))
        else:
            self._listeners[request.id] = hear

    def _drop(self, request_id: str, hear: Listener) -> None:
        if self._listeners.get(request_id) is hear:  # another request of this id may be there by now
            del self._listeners[request_id]
            self.llm.engine.abort(request_id)

    def _tell_all(self, error: EyasError) -> None:
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(error)


def fault(error: Exception) -> EyasError:
    """What callers are told of an error that nobody expected, once it is written down."""
    logger.error("the engine failed: %s", places(error))
    told = EyasError(f"The engine failed ({type(error).__name__}: {error}).")
    told.__cause__ = error
    return told


def places(error: BaseException | None) -> str:
    """Where an error and its causes were raised, without their messages: these may quote what a user wrote."""
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}")
        error = error.__cause__
    return "caused by ".join(found)


def tell(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *news: Any) -> None:
    with contextlib.suppress(RuntimeError):  # a loop that is closed: nobody is there to hear it
        loop.call_soon_threadsafe(function, *news)


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
