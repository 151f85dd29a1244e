"""Every way of failing as OpenAI's error object: one sentence, and the field it is about."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from eyas.core import EyasError, NonFiniteLogitsError, UsageError
from eyas.server.record import Record, log_fault

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {404: "not_found", 405: "method_not_allowed"}


class ApiError(EyasError):
    """What a client is told, and with which HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = str(self) if str(self).endswith((".", "?")) else f"{self}."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def refused(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A request that can never be served, whose fault is in the field ``param``."""
    return ApiError(400, message, param=param, code=code)


def later(status: int, message: str, code: str, seconds: int) -> ApiError:
    """A request that can be served, but not now."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(seconds)})


def api_error(error: Exception) -> ApiError:
    """What a client may know of any error: of those that nobody expected, nothing but that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):  # RequestError too
        return ApiError(400, str(error))
    if isinstance(error, NonFiniteLogitsError):
        return ApiError(500, str(error), code="non_finite_logits")
    if isinstance(error, EyasError):
        return ApiError(500, "The engine failed at this request: the server's log says where.", code="engine_error")
    return ApiError(500, "The server failed at this request: its log says where.", code="internal_error")


def failed(record: Record, error: Exception) -> ApiError:
    """What a client may know of an error, of which the log has the rest."""
    told = api_error(error)
    record.failed(told.code or "invalid_request")
    if told is not error and told.status >= 500:
        log_fault(record, error)
    return told


class JSON(Response):
    """Values of ours as JSON; half of a surrogate pair, which only an error can quote, as a question mark."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


def encoded(content: Any) -> bytes:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def error_response(error: ApiError) -> JSON:
    return JSON(error.body, error.status, error.headers)


def add_handlers(app: FastAPI, fields: frozenset[str]) -> None:
    """``fields`` are the names that may stand in a path to what is wrong in a request."""

    def answer(request: Request, told: ApiError) -> Response:
        request.state.record.failed(told.code or "invalid_request")
        return error_response(told)

    async def known(request: Request, error: Exception) -> Response:
        return error_response(failed(request.state.record, error))

    async def unknown(request: Request, error: Exception) -> Response:
        return answer(request, api_error(error))  # it is raised again behind this, and written down at the gate

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = "There is nothing at this address: see /openapi.json for what there is."
        elif error.status_code == 405:
            message = f"This address does not take {request.method} requests."
        elif error.status_code == 400:  # FastAPI's word for what Python's JSON reader gives up at
            message = "The body cannot be read as JSON: it is nested too deeply, not UTF-8, or has endless numbers."
        told = ApiError(error.status_code, message, code=CODES.get(error.status_code), headers=error.headers)
        return answer(request, told)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, invalid_request(error.errors(), fields))

    app.add_exception_handler(EyasError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unknown)


def invalid_request(errors: Sequence[Mapping[str, Any]], fields: frozenset[str]) -> ApiError:
    """One sentence for the first field that is wrong, as precise about the place in it as pydantic is.

    A value that may be of several types fails at each: where they fail at the same place, all are named.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return refused(None, f"The body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}.")
    found = [(place(error["loc"], fields), sentence(error)) for error in errors if error["loc"][:2] == first["loc"][:2]]
    param = max((path for path, _ in found), key=lambda path: path.count("[") + path.count("."))
    if not param:
        return refused(None, "The body must be a JSON object.")
    if first["type"] == "missing":
        return refused(param, f"{param} is required.", "missing_required_parameter")
    told = " or ".join(dict.fromkeys(text for path, text in found if path == param))
    return refused(param, f"{param}: {told}.", "invalid_value")


def sentence(error: Mapping[str, Any]) -> str:
    if error["type"] in ("model_type", "model_attributes_type"):  # pydantic's word is the name of a class of ours
        return "input should be an object"
    return error["msg"][:1].lower() + error["msg"][1:]


def place(loc: Iterable[Any], fields: frozenset[str]) -> str:
    """``messages[0].content`` of pydantic's path, which also names the types of a union."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]" if path else ""
        elif part in fields:
            path += f".{part}" if path else part
    return path
