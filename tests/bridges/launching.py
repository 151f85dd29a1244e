"""Engines that can be launched: miniature source for the check to read, and an actor where the entry point is."""

from __future__ import annotations

from pathlib import Path

from bridges import actor
from bridges.engines import SGLANG, VLLM, WRAPPER, write

ENTRY = {"sglang": "sglang__launch_server", "vllm": "vllm__entrypoints__cli__main"}


# What writes the calls of a drafter that the plugin would, and answers a question with what the files beside it say.
SERVER = """
import http.server, json, os, stat, sys
from pathlib import Path

HERE = Path(os.environ["HERE"])


class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        folder = Path(os.environ["EYAS_PLUGIN_TRACE"])
        mode = stat.S_IMODE(folder.stat().st_mode)
        said = {"asked": asked, "mode": mode, "pid": os.getpid(), "key": self.headers["Authorization"]}
        (HERE / "said").write_text(json.dumps(said))
        (folder / f"{os.getpid()}.jsonl").write_text((HERE / "lines").read_text())
        status, reply = json.loads((HERE / "reply").read_text())
        if status == 0:
            os._exit(7)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Engine)
print("The server is fired up and ready to roll!", flush=True)
server.serve_forever()
"""
STATE = [1.0, *[0.25] * 16]
CALLS = [
    {"call": "drafter", "engine": "sglang", "class": "LlamaForCausalLMEagle3", "dtype": "bfloat16", "config": {}},
    {"call": "fuse", "states": [[STATE] * 3] * 2},
    {"call": "forward", "tokens": [6, 7], "positions": [0, 1], **dict.fromkeys(("entering", "embedding"), [STATE] * 2)},
    {"call": "logits", "top": [[[8, 2.0], [9, 1.0]]], "normed": [STATE]},
]
CALLS[2]["normed"] = [[2.0, *[0.5] * 16], STATE]
REPLY = {"output_ids": [7, 8, 9]}


def engine(folder: Path, name: str, server: str = "") -> Path:
    """Put it on PYTHONPATH, and any Python has this engine installed. ``server``: its script, else the actor's."""
    more = {"sglang__srt__models__wrapper": WRAPPER} if name == "sglang" else {}
    write(folder, {"sglang": SGLANG, "vllm": VLLM}[name], **more)
    about = folder / f"{name}-0.7.1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.7.1\n")
    (about / "RECORD").write_text(f"{name}/__init__.py,,\n")
    script = folder / f"{ENTRY[name].replace('__', '/')}.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(server or Path(actor.__file__).read_text())
    return folder
