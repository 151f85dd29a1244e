"""Ends a launched engine where the launcher was killed and could not do it itself. Run as a script, of Python's own.

    guard.py LEADER GRACE

Waits until stdin ends, which it does when the launcher is gone, however it went. Then all processes of the session that
LEADER began are asked to end, and killed GRACE seconds later.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def members(session: int) -> list[int]:
    """Processes of a session, zombies left out. A process group would not do: engines make groups of their own."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(place.parent.name))
    return found


def send(session: int, number: int) -> None:
    for process in members(session):
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def main(session: int, grace: float) -> None:
    sys.stdin.buffer.read()
    send(session, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while members(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    while members(session):
        send(session, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
