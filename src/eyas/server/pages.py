"""The playground: a page, its style and its scripts, which hold no secret and load nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

FOLDER = Path(__file__).parent / "playground"
PAGES = {"/": "index.html"} | {
    f"/playground/{name}": name for name in ("playground.css", "playground.js", "client.js", "answer.js", "charts.js")
}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
)
HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}


def add_pages(app: FastAPI) -> None:
    for path, name in PAGES.items():
        _add(app, path, FOLDER / name)


def _add(app: FastAPI, path: str, file: Path) -> None:
    content = file.read_bytes()

    @app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type=KINDS[file.suffix], headers=HEADERS)
