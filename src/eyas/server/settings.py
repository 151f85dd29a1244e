"""How a server serves: names, keys and limits. What the engine does is the engine's to know."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from eyas.core import UsageError

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    model_name: str
    host: str = "127.0.0.1"
    port: int = 30000  # 0: any that is free
    api_key: str | None = field(default=None, repr=False)  # whoever logs settings must not log it
    max_queued_requests: int = 256  # answers that wait for a place among the running ones
    max_body_bytes: int = 16 * MIB
    max_image_bytes: int = 2048 * MIB  # of requests that run or wait, as the target takes them
    body_timeout: float = 30.0  # seconds
    drain_timeout: float = 25.0  # seconds; Kubernetes kills after 30
    model_defaults: bool = True  # sampling that a request leaves open: the target's generation config, else OpenAI's

    def __post_init__(self) -> None:
        checks = [
            (bool(self.model_name), "--served-model-name must not be empty."),
            (0 <= self.port < 1 << 16, f"--port must be in [0, 65535], got {self.port}."),
            (self.max_queued_requests >= 0, f"--max-queued-requests must be >= 0, got {self.max_queued_requests}."),
            (self.max_body_bytes >= 1024, f"--max-body-mib must be at least 1, got {self.max_body_bytes / MIB:g}."),
            (0 <= self.drain_timeout < 1e6, f"--drain-timeout must be >= 0 seconds, got {self.drain_timeout}."),
            (
                self.api_key is None or self.api_key == self.api_key.strip() != "",
                "--api-key must not be empty, nor begin or end with a blank: no client could send it.",
            ),
        ]
        for fine, message in checks:
            if not fine:
                raise UsageError(message)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
