"""What those who run a server ask of it: which one it is, and to forget what it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.responses import Response

from eyas import __version__
from eyas.server.errors import JSON

if TYPE_CHECKING:
    from eyas.server.service import Service


def add_upkeep(app: FastAPI, service: Service, **described: Any) -> None:
    @app.get("/version", **described)
    async def version() -> Response:
        return JSON({"version": __version__})

    @app.post("/flush_cache", **described)
    async def flush_cache() -> Response:
        """Empties the prefix cache; 400 as long as anything is being answered, as in SGLang."""
        await service.forget()
        return JSON({"success": True})
