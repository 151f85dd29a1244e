"""Time to the first token and between tokens under load: ``eyas serve`` against ``vllm serve``, with the same drafter.

    make peers
    python benchmarks/server_latency.py [--rounds 5] [--concurrency 1 4 16] [--tokens 64] [--drafter FOLDER]
                                        [--vllm-python PYTHON] [--only NAME ...] [--out FILE]
    python benchmarks/server_latency.py --show FILE

SmolLM2-135M-Instruct in bfloat16, chat prompts, greedy, no end of sequence. Load and times come from ``vllm bench
serve``. Every server is up from the beginning; whoever does not have its turn is stopped by a signal and uses no CPU.
README.md says the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from peers.prompts import PROMPTS
from servers import ServerError, ServerProcess
from side_by_side import Book, only, provenance, ratio, turned
from workers import Worker, WorkerError

from eyas.bench.client import FORGET
from eyas.bridges.metrics import Exposition

HERE = Path(__file__).resolve().parent
MODEL = "smollm2"  # what the servers call it
CONTEXT = 2048
EYAS, EYAS_PLAIN, VLLM, VLLM_PLAIN = "Eyas", "Eyas plain", "vLLM EAGLE-3", "vLLM plain"
RATIOS = ((EYAS, VLLM), (EYAS_PLAIN, VLLM_PLAIN), (EYAS, VLLM_PLAIN), (EYAS, EYAS_PLAIN), (VLLM, VLLM_PLAIN))


class LoadError(Exception):
    """A run of the load generator that cannot be counted."""


@dataclass(frozen=True)
class Run:
    """One run of the load generator: all requests of a round at one concurrency."""

    first: list[float]  # seconds to each answer's first token
    between: list[float]  # seconds a token after it, of each answer
    gaps: list[float]  # seconds from one piece of a stream to the next, of all answers
    tokens: int
    seconds: float
    acceptance_length: float | None

    @classmethod
    def of(cls, result: Mapping[str, Any], asked: int, tokens: int, acceptance_length: float | None) -> Run:
        """``result`` is what ``vllm bench serve --save-detailed`` wrote. Raises LoadError where anything is missing."""
        lengths, pieces = result["output_lens"], result["itls"]
        errors = [error for error in result["errors"] if error]
        if result["completed"] != asked or errors:
            raise LoadError(f"{result['completed']} of {asked} requests were answered: {''.join(errors[:1])[-300:]}")
        if set(lengths) != {tokens}:
            raise LoadError(f"answers of {sorted(set(lengths))} tokens instead of {tokens}")
        between = [sum(gaps) / (length - 1) for gaps, length in zip(pieces, lengths, strict=True)]
        gaps = [gap for gaps in pieces for gap in gaps]
        return cls(result["ttfts"], between, gaps, sum(lengths), result["duration"], acceptance_length)


MEASURES: dict[str, Callable[[Run], float]] = {  # of a run; ratios are of these
    "first token, ms": lambda run: 1000 * statistics.median(run.first),
    "first token, p95": lambda run: 1000 * float(np.quantile(run.first, 0.95)),
    "between tokens, ms": lambda run: 1000 * statistics.median(run.between),
    "longest gaps, p99": lambda run: 1000 * float(np.quantile(run.gaps, 0.99)),
    "tok/s": lambda run: run.tokens / run.seconds,
}
COMPARED = ("first token, ms", "between tokens, ms", "tok/s")


class Load:
    """``vllm bench serve`` in a process of its own."""

    def __init__(self, python: Path, folder: Path, tokenizer: Path, tokens: int):
        self.folder, self.tokenizer, self.tokens = folder, tokenizer, tokens
        self.prompts = folder / "prompts.json"
        # in ShareGPT's shape, of which the first turn is asked: vLLM reads other files with pandas, which it may lack
        turns = [{"conversations": [{"value": prompt}, {"value": "-"}]} for prompt in PROMPTS]
        self.prompts.write_text(json.dumps(turns))
        command = [str(python), str(HERE / "peers" / "vllm_load.py")]
        self.worker = Worker("the load generator", command, VLLM_SETTINGS)

    def run(self, url: str, concurrency: int, requests: int) -> dict[str, Any]:
        """What it measured. Raises WorkerError."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        arguments = ["--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions"]
        arguments += ["--model", MODEL, "--tokenizer", str(self.tokenizer), "--seed", "0"]
        arguments += ["--dataset-name", "sharegpt", "--dataset-path", str(self.prompts), "--disable-shuffle"]
        arguments += ["--num-prompts", str(requests), "--sharegpt-output-len", str(self.tokens)]
        arguments += ["--max-concurrency", str(concurrency), "--ignore-eos", "--temperature", "0", "--disable-tqdm"]
        arguments += ["--save-result", "--save-detailed", "--result-dir", str(self.folder)]
        self.worker.tell([*arguments, "--result-filename", result.name])
        return json.loads(result.read_text())


VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "HF_HUB_OFFLINE": "1",
}


def commands(args: argparse.Namespace, target: Path, drafter: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Every server's command line and environment."""
    most = str(max(args.concurrency))
    eyas = [sys.executable, "-m", "eyas", "serve", str(target), "--dtype", "bfloat16"]
    eyas += ["--served-model-name", MODEL, "--context-length", str(CONTEXT), "--max-running-requests", most]
    eyas += ["--enable-torch-compile"] if args.compile else []
    # what vllm serve runs; that itself fails where the package is called vllm-cpu
    vllm = [str(args.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    vllm += [
        "--dtype",
        "bfloat16",
        "--served-model-name",
        MODEL,
        "--max-model-len",
        str(CONTEXT),
        "--max-num-seqs",
        most,
    ]
    vllm += ["--host", "127.0.0.1", *shlex.split(args.vllm_flags)]
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": args.draft_tokens}
    theirs = {**VLLM_SETTINGS, "VLLM_CPU_OMP_THREADS_BIND": args.vllm_threads}
    preloaded = next(args.vllm_python.parent.parent.glob("lib/libiomp5.so"), None)
    if preloaded is not None:  # as its manual asks for
        theirs["LD_PRELOAD"] = str(preloaded)
    ours = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    found = {
        EYAS: ([*eyas, "--drafter", str(drafter)], ours),
        EYAS_PLAIN: ([*eyas, "--drafter", "none"], ours),
        VLLM: ([*vllm, "--speculative-config", json.dumps(speculative)], theirs),
        VLLM_PLAIN: (vllm, theirs),
    }
    return only(found, args.only)


def runs(book: Book, name: str, concurrency: int) -> list[Run]:
    return [Run(**entry) for entry in book.of(name, concurrency)]


@contextmanager
def started(commands: Mapping[str, tuple[list[str], dict[str, str]]]) -> Iterator[dict[str, ServerProcess]]:
    """One after another, each halted once it is ready. Whoever fails is left out, and said so."""
    servers: dict[str, ServerProcess] = {}
    begun: list[ServerProcess] = []
    try:
        for name, (command, environment) in commands.items():
            print(f"starting {name} ...", file=sys.stderr, flush=True)
            begun.append(server := ServerProcess(name, command, environment))
            try:
                server.wait()
            except ServerError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            server.halt()
            servers[name] = server
        yield servers
    finally:
        for server in begun:
            server.end()
            if server in servers.values():  # the logs of those who failed are kept
                server.log.unlink()


def measured(server: ServerProcess, load: Load, concurrency: int) -> Run:
    """One run against one server, awake for it. Raises LoadError, WorkerError, or ServerError where it is gone."""
    requests = concurrency * max(2, 8 // concurrency)
    server.go_on()
    try:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as client:
            if not any(client.post(path).is_success for path in FORGET):
                raise LoadError("the prefix cache cannot be emptied")
            before = drafts(client.get("/metrics").text)
            result = load.run(server.url, concurrency, requests)
            verified, accepted = np.subtract(drafts(client.get("/metrics").text), before)
    except httpx.HTTPError as error:
        raise ServerError(f"{server.name} does not answer any more: {error!r} ({server.log})") from error
    finally:
        server.halt()
    return Run.of(result, requests, load.tokens, float(1 + accepted / verified) if verified else None)


def drafts(page: str) -> tuple[float, float]:
    """Drafts verified and draft tokens accepted so far, by the names that vLLM and Eyas share."""
    told = Exposition.parse(page)

    def count(what: str) -> float:
        names = [f"{engine}:spec_decode_num_{what}_total" for engine in ("eyas", "vllm")]
        return sum(value for name in names for value in told.values(name).values())

    return count("drafts"), count("accepted_tokens")


def measure(servers: dict[str, ServerProcess], load: Load, book: Book, args: argparse.Namespace) -> None:
    """Rounds that do not count, then those that do; whoever fails is out from there on. ``servers`` loses those."""
    for turn in range(-args.warm_ups, args.rounds):
        for concurrency in args.concurrency:
            for name in turned(list(servers), turn):
                try:
                    run = measured(servers[name], load, concurrency)
                except (LoadError, ServerError, WorkerError) as error:
                    print(f"out: {name} at {concurrency}: {error}", file=sys.stderr)
                    servers.pop(name).end()
                else:
                    if turn >= 0:
                        book.enter(name, concurrency, vars(run))
        book.write()
        what = f"round {turn + 1} of {args.rounds}" if turn >= 0 else "warmed up"
        print(what, file=sys.stderr, flush=True)


# What is shown


def show(book: Book) -> None:
    about = book.about
    print(f"SmolLM2-135M-Instruct bfloat16, {about['tokens']} new tokens an answer, greedy, chat, streamed.")
    print(f"{about['machine']}; {', '.join(f'{name} {number}' for name, number in about['versions'].items())}.")
    print(
        f"Load: vllm bench serve. vLLM drafts {about['draft_tokens']} tokens, Eyas as many as pay. {about['settings']}"
    )
    for concurrency in about["concurrency"]:
        print(f"\n**{concurrency} at a time** (medians of {most_rounds(book)} rounds)\n")
        table(["", *MEASURES, "acceptance length"], [row(book, name, concurrency) for name in book.rounds])
    print(
        "\n**Ratios**, medians of the rounds' ratios with 95% intervals; times below 1 and tok/s above 1 are better\n"
    )
    lines = [
        [
            f"{over} / {under} at {concurrency}",
            *(shown_ratio(book, over, under, concurrency, what) for what in COMPARED),
        ]
        for over, under in RATIOS
        for concurrency in about["concurrency"]
        if book.of(over, concurrency) and book.of(under, concurrency)
    ]
    table(["", *COMPARED], lines)


def most_rounds(book: Book) -> int:
    return max((len(entries) for by in book.rounds.values() for entries in by.values()), default=0)


def row(book: Book, name: str, concurrency: int) -> list[str]:
    found = runs(book, name, concurrency)
    if not found:
        return [name, *["out"] * len(MEASURES), ""]
    known = [run.acceptance_length for run in found if run.acceptance_length is not None]
    cells = [f"{statistics.median(map(measure, found)):.1f}" for measure in MEASURES.values()]
    return [name, *cells, f"{statistics.mean(known):.2f}" if known else ""]


def shown_ratio(book: Book, over: str, under: str, concurrency: int, what: str) -> str:
    both = (runs(book, name, concurrency) for name in (over, under))
    pairs = list(zip(*both, strict=False))  # who is out stays out
    middle, low, high = ratio([MEASURES[what](a) for a, _ in pairs], [MEASURES[what](b) for _, b in pairs])
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"| {' | '.join(head)} |\n|---{'|---:' * (len(head) - 1)}|")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--drafter", type=Path, help="default: the one that comes with Eyas")
    parser.add_argument("--draft-tokens", type=int, default=2, help="of vLLM's chain, the root not counted")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="Eyas's steps; vLLM does"
    )
    parser.add_argument("--vllm-threads", default="auto", help="VLLM_CPU_OMP_THREADS_BIND: auto, or cores such as 0-1")
    parser.add_argument("--vllm-flags", default="", help="more of them for vllm serve, as one argument")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=os.environ.get("EYAS_VLLM_PYTHON") or HERE.parent / "build" / "peers-vllm" / "bin" / "python",
        help="of the environment with vLLM; EYAS_VLLM_PYTHON names it too",
    )
    parser.add_argument("--only", nargs="+", help="names of servers")
    parser.add_argument("--out", type=Path, help="where results are written after each round, as JSON")
    parser.add_argument("--show", type=Path, help="print what such a file says, and measure nothing")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.show:
        show(Book.read(args.show))
        return
    if max(args.concurrency) * 2 > len(PROMPTS):
        raise SystemExit(f"there are {len(PROMPTS)} prompts, so concurrency ends at {len(PROMPTS) // 2}")

    from eyas import __version__
    from eyas.drafter.shipped import shipped_drafter
    from eyas.target.smollm2 import smollm2_folder

    target, drafter = smollm2_folder(), args.drafter or shipped_drafter("smollm2")
    if drafter is None:
        raise SystemExit("no drafter comes with this Eyas: name one with --drafter")
    with tempfile.TemporaryDirectory(prefix="eyas-latency-") as folder:
        load = Load(args.vllm_python, Path(folder), target, args.tokens)
        try:
            about = {
                "machine": provenance(),
                "versions": {"eyas": __version__, **load.worker.about},
                "tokens": args.tokens,
                "concurrency": args.concurrency,
                "draft_tokens": args.draft_tokens,
                "settings": f"Eyas {'compiled' if args.compile else 'eager'}; "
                f"vLLM's threads: {args.vllm_threads}, flags: {args.vllm_flags or 'none more'}.",
            }
            book = Book(about, path=args.out)
            asked = commands(args, target, drafter)
            with started(asked) as servers:
                measure(servers, load, book, args)
                complete = len(servers) == len(asked)
        finally:
            load.worker.end()
    show(book)
    sys.exit(0 if complete else 1)


if __name__ == "__main__":
    main()
