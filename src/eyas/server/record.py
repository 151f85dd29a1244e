"""What one HTTP request came to: the line in the log, which above the level debug never holds a user's text."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, field

from eyas.engine.serving import places

logger = logging.getLogger("eyas.server")

LEFT = 499  # nginx's word for a client that did not wait
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
QUIET = frozenset({"/health", "/health_generate", "/metrics"})  # asked every few seconds, by machines
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass
class Record:
    id: str
    method: str
    endpoint: str = "-"  # the route, not the address: that may hold anything
    status: int = LEFT
    complete: bool = False  # the whole response is sent
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    begin: float = field(default_factory=time.perf_counter)
    read: float = 0.0  # when all of it was there: how fast a caller sends it says nothing about the server
    first: float | None = None  # when the first token came

    @classmethod
    def of(cls, method: str, given: str) -> Record:
        """``given`` is the caller's own x-request-id, taken if it is sane."""
        return cls(given if _ID.fullmatch(given) else uuid.uuid4().hex, method if method in METHODS else "-")

    def failed(self, what: str) -> None:
        self.error = what

    def log(self) -> None:
        level = logging.DEBUG if self.endpoint in QUIET else logging.INFO
        logger.log(level, "request %s", " ".join(f"{name}={value}" for name, value in self._facts().items()))

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {
            "id": self.id,
            "method": self.method,
            "endpoint": self.endpoint,
            "status": self.status,
            "seconds": f"{time.perf_counter() - self.begin:.3f}",
        }
        if self.prompt_tokens:
            tokens = {name: getattr(self, name) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
            facts |= tokens
        if self.first is not None:
            facts["first_token_seconds"] = f"{self.first - self.read:.3f}"
        return facts | ({"error": self.error} if self.error else {})


def log_fault(record: Record, error: BaseException) -> None:
    """Where a fault happened; what it says, which may quote what a user wrote, at the level debug only."""
    logger.error("fault id=%s error=%s", record.id, places(error))
    logger.debug("fault id=%s", record.id, exc_info=error)
