"""Behaves like an engine, as ``ACT`` says, act by act: a log as real ones write it, a health endpoint,
and every kind of end.

It stands in a miniature engine where the real entry point is. Only Python's own modules, no GPU, no model.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import entry_points
from pathlib import Path

ENGINE = "sglang" if "launch_server" in Path(__file__).name else "vllm"
SAYS = {
    "sglang": [
        "[2026-03-02 10:00:00] server_args=ServerArgs(model_path='m')",
        "[2026-03-02 10:00:05 TP0] Load weight begin. avail mem=139.11 GB",
        "\rLoading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]",
        "\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00,  8.5it/s]",
        "\rLoading safetensors checkpoint shards: 100% Completed | 2/2 [00:00<00:00,  8.5it/s]\n",
        "[2026-03-02 10:00:09 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16",
        "[2026-03-02 10:00:09 TP0] KV Cache is allocated. #tokens: 1000, K size: 1.00 GB, V size: 1.00 GB",
        "[2026-03-02 10:00:10 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=9.11 GB",
    ],
    "vllm": [
        "(APIServer pid=1) INFO 11-30 08:12:50 [model.py:733] Resolved architecture: LlamaForCausalLM",
        "(EngineCore pid=2) INFO 11-30 08:12:57 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: x",
        "(Worker pid=3) INFO 11-30 08:13:03 [cpu_model_runner.py:68] Starting to load model m...",
        "\rLoading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]",
        "\rLoading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  8.58it/s]\n",
        "(Worker pid=3) INFO 11-30 08:13:04 [cpu_model_runner.py:75] Loading drafter model...",
        "(EngineCore pid=2) INFO 11-30 08:14:18 [core.py:402] init engine (profile, create kv cache) took 73.47 s",
    ],
}
READY = {
    "sglang": "[2026-03-02 10:01:00] The server is fired up and ready to roll!",
    "vllm": "INFO:     Application startup complete.",
}
SGLANG_DIES = """\
[2026-03-02 10:02:32 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/sglang/srt/managers/scheduler.py", line 3140, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "/sglang/srt/model_executor/cuda_graph_runner.py", line 365, in __init__
    self.model_runner.model.set_eagle3_layers_to_capture()
AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute 'set_eagle3_layers_to_capture'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/sglang/srt/model_executor/cuda_graph_runner.py", line 372, in capture
    raise Exception(f"Capture cuda graph failed: {e}")
Exception: Capture cuda graph failed: 'KimiK25ForConditionalGeneration' object has no attribute \
'set_eagle3_layers_to_capture'

[2026-03-02 10:02:32] Received sigquit from a child process. It usually means the child failed.
"""
_PREFIX = "(EngineCore pid=2) ERROR 11-30 08:13:05 [core.py:1510] "
VLLM_DIES = "\n".join(
    [
        _PREFIX + "EngineCore failed to start.",
        _PREFIX + "Traceback (most recent call last):",
        _PREFIX + '  File "/vllm/v1/engine/core.py", line 1480, in run_engine_core',
        _PREFIX + "    engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)",
        _PREFIX + '  File "/vllm/v1/worker/gpu_model_runner.py", line 5234, in _setup_eagle3_aux_hidden_state_outputs',
        _PREFIX + "    raise RuntimeError(",
        _PREFIX + "RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested",
        "(EngineCore pid=2) Process EngineCore:",
        "(APIServer pid=1) Traceback (most recent call last):",
        '(APIServer pid=1)   File "/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup',
        "(APIServer pid=1)     raise RuntimeError(",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
        "{'EngineCore': 1}",
        "",
    ]
)
STOPS = (signal.SIGINT, signal.SIGTERM)
STOPPED = threading.Event()
WORKERS: list[subprocess.Popen] = []
DIES = {"sglang": SGLANG_DIES, "vllm": VLLM_DIES}


def say(text: str) -> None:
    os.write(1, (text if text.startswith("\r") else text.rstrip("\n") + "\n").encode())


class Health(http.server.BaseHTTPRequestHandler):
    well_from = 0.0
    answered = threading.Event()

    def do_GET(self) -> None:
        well = self.path == "/health" and time.monotonic() >= self.well_from
        self.send_response(200 if well else 503)
        self.end_headers()
        if well:
            self.answered.set()

    def log_message(self, *_: object) -> None:
        pass


def serve(well_after: float = 0.0) -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    Health.well_from = time.monotonic() + well_after
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def family() -> None:
    """One child that ignores what it is told, one with a session of its own, one whose parent ends."""
    stubborn = "import time; time.sleep(99)"
    before = [signal.signal(number, signal.SIG_IGN) for number in STOPS]  # which children inherit
    pids = [subprocess.Popen([sys.executable, "-c", stubborn]).pid]
    pids.append(subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True).pid)
    forks = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=2); print(p.pid)"
    )
    ran = subprocess.run([sys.executable, "-c", forks], stdout=subprocess.PIPE, text=True, check=True)
    pids.append(int(ran.stdout))
    for number, handler in zip(STOPS, before, strict=True):
        signal.signal(number, handler)
    record(pids)


def work() -> None:
    """A child without handlers, which finishing takes."""
    WORKERS.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"]))


def finish() -> None:
    time.sleep(0.3)
    if any(worker.poll() is not None for worker in WORKERS):
        sys.exit(5)
    for worker in WORKERS:
        worker.kill()


def record(pids: list[int]) -> None:
    if folder := os.environ.get("PIDS"):
        place = Path(folder) / "pids"
        place.with_suffix(".part").write_text(json.dumps([os.getpid(), *pids]))
        place.with_suffix(".part").rename(place)


def plug_in() -> None:
    group = {"sglang": "sglang.srt.plugins", "vllm": "vllm.general_plugins"}[ENGINE]
    for entry in entry_points(group=group):
        entry.load()()


def prove() -> None:
    """As the plugin's mark is once a model was made."""
    (mark,) = Path(os.environ["EYAS_PLUGIN_MARKERS"]).glob("*.json")
    name = os.environ["EYAS_PLUGIN"]
    done = {"added": ["get_embed_and_head"], "repaired": [], "through": "language_model: LlamaForCausalLM"}
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"classes": {name: done}}))


def tell() -> None:
    say("ENVIRONMENT " + json.dumps(dict(os.environ)))
    say("ARGUMENTS " + json.dumps(sys.argv[1:]))


def leave(code: int, after: float = 0.0) -> None:
    STOPPED.wait(after)
    sys.exit(code)


def die(code: int) -> None:
    say(DIES[ENGINE])
    sys.exit(code)


def hang() -> None:
    say(DIES[ENGINE])
    time.sleep(99)


def ignore() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


ACTS = {
    "plug": plug_in,
    "proves": prove,
    "environment": tell,
    "family": family,
    "workers": work,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "unknown": lambda: 1 / 0,
    "dies": lambda: die(1),
    "later": lambda: die(7),
    "hangs": hang,
    "stubborn": ignore,
    "listens": serve,
    "slowly": lambda: serve(0.7),
    "ready": lambda: say(READY[ENGINE]),
    "answers": lambda: (Health.answered.wait(99), time.sleep(1)),  # so that it was heard
    "interrupts": lambda: os.kill(os.getppid(), signal.SIGINT),
    "mutters": lambda: say("EngineCore encountered a fatal error."),  # so it says, and works all the same
    "warns": lambda: say(
        "Traceback (most recent call last):\n  File \"x.py\"\nModuleNotFoundError: No module named 'y'"
    ),
    "briefly": lambda: leave(0, 1.0),
    "badly": lambda: leave(3),
}


def main(acts: list[str]) -> None:
    for number in STOPS:
        signal.signal(number, lambda *_: STOPPED.set())
    record([])
    for text in SAYS[ENGINE]:
        say(text)
    for act in acts:
        ACTS[act]()
    STOPPED.wait(99)
    finish()
    say("[shutdown] as asked")


if __name__ == "__main__":
    main(os.environ["ACT"].split())
