"""What stands where vLLM's entry point is: with a real server of Eyas behind it, or a quick one that is acted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

READY = "INFO:     Application startup complete."


def flag(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def eyas(config: dict[str, Any]) -> None:
    from eyas.cli.main import main

    drafts = ["--drafter", config["model"], "--speculation", "fixed"] if config else ["--drafter", "none"]
    if config:
        drafts += ["--speculative-num-steps", str(config["num_speculative_tokens"])]
    print(READY, flush=True)  # so /health alone decides
    place = ["--host", flag("--host"), "--port", flag("--port"), "--context-length", "128", "--served-model-name", "m"]
    main(["serve", sys.argv[2], *drafts, *place])


def acted(config: dict[str, Any]) -> None:
    """``DIES`` names the side that breaks off, and at which request; ``PAUSE``: seconds of a step."""
    from bench.servers import Server, serving
    from fastapi import FastAPI

    class Healthy(Server):
        def app(self) -> FastAPI:
            app = super().app()
            app.get("/health")(lambda: "fine")
            if config := json.loads(flag("--profiler-config", "null")):
                Profiler(config, steps).attach(app)
            return app

    steps = config.get("num_speculative_tokens", 0)
    if flag("--refuse"):
        print(f"Traceback (most recent call last):\nValueError: {flag('--refuse')} is refused", flush=True)
        sys.exit(1)
    side, _, number = os.environ.get("DIES", "").partition("@")
    dies = int(number) if side == ("with" if steps else "without") else None
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with serving(
        Healthy(pause=float(os.environ.get("PAUSE", "0.001")), burst=1 + steps, dies_at=dies), int(flag("--port"))
    ) as server:
        with contextlib.suppress(KeyError), Path(os.environ["STARTS"]).open("a") as file:
            file.write(f"{steps} {server.port} {os.getpid()}\n")
        print(READY, flush=True)
        while not over.wait(0.05) and not server.dead:
            pass
    sys.exit(7 if server.dead else 0)


class Profiler:
    """Two ranks, which write their traces once they are asked to stop; of a step twice as long with a drafter.

    ``FAULT`` names the side that "refuses", "writes nothing" or is "cut off".
    """

    def __init__(self, config: dict[str, Any], drafts: int):
        self.folder, self.steps = Path(config["torch_profiler_dir"]), config["max_iterations"]
        self.factor, side = (2, "with") if drafts else (1, "without")
        which, _, fault = os.environ.get("FAULT", "").partition(": ")
        self.fault, self.running = fault if which == side else "", False

    def attach(self, app: Any) -> None:
        from fastapi import Response

        @app.post("/start_profile")
        def start() -> Response:
            if self.fault == "refuses":
                return Response("the profiler is broken", 500)
            self.running = True
            return Response()

        @app.post("/stop_profile")
        def stop() -> None:
            assert self.running
            self.running = False
            if self.fault != "writes nothing":
                for rank in (1, 0):
                    self.write(rank)

    def write(self, rank: int) -> None:
        from bench.traces import gpu_steps, write

        events = gpu_steps(self.steps - 1, 1000 * self.factor, 515 + 100 * rank)
        file = write(self.folder / f"dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{time.time_ns()}.pt.trace.json.gz", events)
        if self.fault == "cut off":
            file.write_bytes(file.read_bytes()[:-40])


if __name__ == "__main__":
    assert sys.argv[1] == "serve"
    {"eyas": eyas, "acted": acted}[os.environ["ACT"]](json.loads(flag("--speculative-config", "{}")))
