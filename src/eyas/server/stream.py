"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send

from eyas.server.errors import encoded, failed
from eyas.server.record import Record

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies shall pass on what they get


class EventStream(StreamingResponse):
    """``events`` are ended with the connection, not when somebody collects them."""

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], record: Record):
        self._events, self._record = events, record
        super().__init__(self._lines(), media_type="text/event-stream", headers=HEADERS)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)

    async def _lines(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events:
                yield b"data: " + encoded(event) + b"\n\n"
        except Exception as error:  # the status is sent: what went wrong is an event too
            yield b"data: " + encoded(failed(self._record, error).body) + b"\n\n"
        yield b"data: [DONE]\n\n"
