"""For test_attention.py: the kernel asked for in a process of its own, which imports nothing but what it needs."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from eyas.target import attention


def ask(says: Connection, umask: int | None, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    if umask is not None:
        os.umask(umask)
    says.send(str(attention.prepare()))
