"""Eyas, transformers and vLLM side by side: tokens a second, time to the first token, time between tokens.

    make peers
    python benchmarks/serving.py [--rounds 10] [--tokens 128] [--concurrency 1 4 16 32] [--drafter FOLDER]
                                 [--only NAME ...] [--out FILE]
    python benchmarks/serving.py --show FILE

SmolLM2-135M-Instruct in bfloat16, chat prompts, greedy, no end of sequence. Every contender is a process of its own
that loads once; a round gives each of them the same prompts, all at once, and begins with another one each time.
Whoever does not have its turn is stopped by a signal and uses no CPU. README.md says what the contenders are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers.prompts import PROMPTS
from side_by_side import provenance, show_ratio

HERE = Path(__file__).resolve().parent
DRAFT_VOCABULARY = 8192

PLAIN, AUTO, FIXED, SCRIPTED = "Eyas plain", "Eyas auto", "Eyas fixed chain", "Eyas auto, scripted acceptance"
EAGER, COMPILED = "transformers generate, eager", "transformers generate, compiled"
CONTINUOUS = "transformers continuous batching"
VLLM, VLLM_EAGLE = "vLLM plain", "vLLM EAGLE-3"


@dataclass(frozen=True)
class Bar:
    """A ratio of output speeds that design calls good; ``at``: concurrencies it is for, none for all."""

    over: str
    under: str
    at: tuple[int, ...] = ()
    least: float | None = None  # None: shown without a bar


BARS = (
    Bar(PLAIN, VLLM, (1,), 1.0),
    Bar(PLAIN, VLLM, (16,), 0.9),
    Bar(PLAIN, VLLM, (4, 32)),
    Bar(AUTO, PLAIN, (), 0.98),
    Bar(SCRIPTED, PLAIN, (), 0.98),
    Bar(AUTO, EAGER, (1,), 3.0),
    Bar(AUTO, VLLM, (1,), 1.6),
    Bar(AUTO, VLLM_EAGLE, (1,), 1.1),
    Bar(SCRIPTED, EAGER, (1,), 3.0),
    Bar(SCRIPTED, VLLM, (1,), 1.6),
    Bar(SCRIPTED, VLLM, (4, 16, 32)),
    Bar(FIXED, PLAIN),
    Bar(FIXED, VLLM_EAGLE),
    Bar(VLLM_EAGLE, VLLM),
    Bar(PLAIN, EAGER),
    Bar(PLAIN, COMPILED),
    Bar(PLAIN, CONTINUOUS),
)
HEAD = (
    f"{'':<36} {'tok/s':>8} {'(least to most)':>18} {'first token, ms':>15} {'p95':>8} "
    f"{'between, ms':>11} {'accept. length':>14} {'rounds':>6}"
)
STEP_BAR = 1.35  # one step with a chain of 5 over a plain one, batch 1


class PeerError(Exception):
    """A contender cannot go on; the others can."""


class Peer:
    """A worker process. It is stopped but for its turns."""

    def __init__(self, name: str, command: Sequence[str], threads: int):
        self.name = name
        self.log = Path(tempfile.mkstemp(prefix="eyas-serving-", suffix=".log")[1])
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # a group of its own: a signal reaches whatever it starts
            )
        self.about: dict[str, Any] = self._hear()["ready"]
        self._signal(signal.SIGSTOP)

    def round(self, prompts: Sequence[Sequence[int]], tokens: int, warm_up: bool = False) -> dict[str, Any]:
        """One round, as ``peers/protocol.py`` has it. Raises PeerError, also where tokens are missing."""
        self._signal(signal.SIGCONT)
        try:
            order = {"prompts": prompts, "tokens": tokens, "warm_up": warm_up}
            print(json.dumps(order), file=self.process.stdin, flush=True)
            result = self._hear()
        except BrokenPipeError:
            raise PeerError(self._ended()) from None
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in result:
            raise PeerError(f"{result['error']} ({self.log})")
        found = {len(answer) for answer in result["answers"]}
        if found != {tokens}:
            raise PeerError(f"made {sorted(found)} tokens instead of {tokens} ({self.log})")
        return result

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(self._ended())
        return json.loads(line)

    def _ended(self) -> str:
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"ended: {''.join(last)} ({self.log})"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def commands(args: argparse.Namespace, target: Path, drafter: Path) -> dict[str, list[str]]:
    """Every contender's command line. Without a trained drafter, one is made to accept as one would."""

    def worker(python: Path | str, name: str, *rest: str) -> list[str]:
        return [str(python), str(HERE / "peers" / f"{name}_worker.py"), str(target), *rest, "--most", most]

    most = str(max(args.concurrency))
    compiling = ("--compile",) if args.compile else ()
    pair = ("--drafter", str(drafter), "--draft-tokens", str(args.draft_tokens))
    feigned = (*pair, "--accept-rate", str(args.accept_rate))
    found = {
        PLAIN: worker(sys.executable, "eyas", "off", *compiling),
        AUTO: worker(sys.executable, "eyas", "auto", *pair, *compiling),
        FIXED: worker(sys.executable, "eyas", "fixed", *pair, *compiling),
        EAGER: worker(args.transformers_python, "transformers", "eager"),
        COMPILED: worker(args.transformers_python, "transformers", "compiled"),
        CONTINUOUS: worker(args.transformers_python, "transformers", "continuous"),
        VLLM: worker(args.vllm_python, "vllm"),
        VLLM_EAGLE: worker(args.vllm_python, "vllm", *pair),
    }
    if args.drafter is None:
        found[SCRIPTED] = worker(sys.executable, "eyas", "auto", *feigned, *compiling)
    if unknown := set(args.only or ()) - set(found):
        raise SystemExit(f"no such contender: {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    return {name: command for name, command in found.items() if not args.only or name in args.only}


@dataclass
class Book:
    """What was measured, as JSON: by contender and concurrency, one entry a round, in the order of the rounds."""

    about: dict[str, Any]
    rounds: dict[str, dict[str, list[dict[str, Any]]]]
    path: Path | None = None

    def enter(self, name: str, concurrency: int, result: Mapping[str, Any]) -> None:
        answers = result["answers"]
        entry = {
            "seconds": result["seconds"],
            "tokens": sum(map(len, answers)),
            "first": result["first"],
            "gaps": [
                (last - first) / max(len(answer) - 1, 1)
                for first, last, answer in zip(result["first"], result["last"], answers, strict=True)
            ],
            "acceptance_length": result["acceptance_length"],
        }
        self.rounds.setdefault(name, {}).setdefault(str(concurrency), []).append(entry)

    def write(self) -> None:
        """The whole file anew, complete or not at all."""
        if self.path is not None:
            draft = self.path.with_name(f".{self.path.name}.part")
            draft.write_text(json.dumps({"about": self.about, "rounds": self.rounds}) + "\n", encoding="utf-8")
            draft.replace(self.path)

    def speeds(self, name: str, concurrency: int) -> list[float]:
        """Output tokens a second of all prompts together, by round."""
        return [entry["tokens"] / entry["seconds"] for entry in self.rounds.get(name, {}).get(str(concurrency), [])]

    def pooled(self, name: str, concurrency: int, what: str) -> list[float]:
        """``first`` or ``gaps`` of every prompt of every round."""
        return [value for entry in self.rounds.get(name, {}).get(str(concurrency), []) for value in entry[what]]

    def acceptance_length(self, name: str, concurrency: int) -> float | None:
        entries = self.rounds.get(name, {}).get(str(concurrency), [])
        known = [entry["acceptance_length"] for entry in entries if entry["acceptance_length"] is not None]
        return statistics.mean(known) if known else None


def encode(target: Path) -> list[list[int]]:
    """Token ids of the chat prompts, in the target's own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        )
        for prompt in PROMPTS
    ]


@contextlib.contextmanager
def drafter_folder(given: Path | None, target: Path) -> Iterator[Path]:
    """The drafter to use: the one given, or an untrained one of the usual shape in a temporary folder."""
    if given is not None:
        yield given
        return
    import torch

    from eyas.drafter.model import untrained
    from eyas.drafter.storage import save

    config = json.loads((target / "config.json").read_text())
    sizes = (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"])
    with tempfile.TemporaryDirectory(prefix="eyas-serving-") as folder:
        save(untrained(*sizes, draft_vocab_size=DRAFT_VOCABULARY, dtype=torch.bfloat16), folder, "vllm")
        yield Path(folder)


def start(commands: Mapping[str, Sequence[str]], threads: int) -> dict[str, Peer]:
    """One after another: loading and compiling disturb nobody then. Whoever fails is left out, and said so."""
    peers = {}
    for name, command in commands.items():
        print(f"starting {name} ...", file=sys.stderr, flush=True)
        try:
            peers[name] = Peer(name, command, threads)
        except (PeerError, OSError) as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
    return peers


def measure(peers: dict[str, Peer], prompts: list[list[int]], book: Book, args: argparse.Namespace) -> None:
    """Warm-up, then the rounds; whoever fails is out from there on. ``peers`` loses those."""

    def take_turn(name: str, concurrency: int, warm_up: bool = False) -> None:
        try:
            result = peers[name].round(prompts[:concurrency], args.tokens, warm_up)
        except PeerError as error:
            print(f"out: {name} at {concurrency}: {error}", file=sys.stderr)
            peers.pop(name).end()
        else:
            if not warm_up:
                book.enter(name, concurrency, result)

    for name in list(peers):
        for concurrency in args.concurrency:
            for _ in range(args.warm_ups):
                if name in peers:
                    print(f"warming up {name} at {concurrency} ...", file=sys.stderr, flush=True)
                    take_turn(name, concurrency, warm_up=True)
    for turn in range(args.rounds):
        for concurrency in args.concurrency:
            names = list(peers)
            shift = turn % max(len(names), 1)
            for name in names[shift:] + names[:shift]:
                take_turn(name, concurrency)
        book.write()
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)


def show(book: Book) -> None:
    about = book.about
    print(f"SmolLM2-135M-Instruct bfloat16, {about['tokens']} new tokens, greedy, all prompts at once")
    print(about["machine"])
    for name, settings in about["contenders"].items():
        print(f"  {name}: {', '.join(f'{key} {value}' for key, value in settings.items())}")
    print(f"Drafter: {about['drafter']}")
    for concurrency in about["concurrency"]:
        print(f"\nConcurrency {concurrency}")
        head = ("tok/s", "(least to most)", "first token, ms", "p95", "between, ms", "accept. length", "rounds")
        print(
            f"{'':<36} {head[0]:>8} {head[1]:>18} {head[2]:>15} {head[3]:>8} {head[4]:>11} {head[5]:>14} {head[6]:>6}"
        )
        for name in book.rounds:
            _show_row(book, name, concurrency)
    print("\nRatios of output speed: median of the rounds' ratios [95% interval], and the bar")
    for bar in BARS:
        for concurrency in about["concurrency"]:
            if not bar.at or concurrency in bar.at:
                _show_bar(book, bar, concurrency)
    _show_step(book, about["draft_tokens"])


def _show_row(book: Book, name: str, concurrency: int) -> None:
    speeds = book.speeds(name, concurrency)
    if not speeds:
        return
    first, gaps = (1000 * np.asarray(book.pooled(name, concurrency, what)) for what in ("first", "gaps"))
    tau = book.acceptance_length(name, concurrency)
    span = f"({min(speeds):.1f} to {max(speeds):.1f})"
    print(
        f"{name:<36} {statistics.median(speeds):8.1f} {span:>18} {np.median(first):15.1f} "
        f"{np.quantile(first, 0.95):8.1f} {np.median(gaps):11.2f} {f'{tau:.2f}' if tau else '':>14} {len(speeds):6d}"
    )


def _show_bar(book: Book, bar: Bar, concurrency: int) -> None:
    over, under = book.speeds(bar.over, concurrency), book.speeds(bar.under, concurrency)
    count = min(len(over), len(under))  # who is out is out for good, so rounds stay pairs
    if count:
        text = f"bar >= {bar.least}" if bar.least is not None else ""
        show_ratio(f"{bar.over} / {bar.under} at {concurrency}", over[:count], under[:count], text)


def _show_step(book: Book, draft_tokens: int) -> None:
    """A step's time, from the time between tokens and the tokens a step made."""
    pairs = zip(book.rounds.get(FIXED, {}).get("1", []), book.rounds.get(PLAIN, {}).get("1", []), strict=False)
    steps = [(chain["gaps"][0] * chain["acceptance_length"], plain["gaps"][0]) for chain, plain in pairs]
    if steps:
        bar = f"bar <= {STEP_BAR}" if draft_tokens == 5 else ""
        what = f"Time of a step with a chain of {draft_tokens} / a plain step at 1"
        show_ratio(what, [chain for chain, _ in steps], [plain for _, plain in steps], bar)


def main() -> None:
    built = HERE.parent / "build"
    own = built / "peers-transformers" / "bin" / "python"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-ups", type=int, default=2, help="rounds that do not count, at every concurrency")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--drafter", type=Path, help="a trained drafter; default: an untrained one")
    parser.add_argument("--draft-tokens", type=int, default=5, help="of a chain, the root not counted")
    parser.add_argument("--accept-rate", type=float, default=0.625, help="scripted where the drafter is untrained")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="Eyas compiles its steps"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="+", help="names of contenders")
    parser.add_argument("--vllm-python", type=Path, default=built / "peers-vllm" / "bin" / "python")
    parser.add_argument("--transformers-python", type=Path, default=own if own.exists() else Path(sys.executable))
    parser.add_argument("--out", type=Path, help="where results are written after each round, as JSON")
    parser.add_argument("--show", type=Path, help="print what such a file says, and measure nothing")
    args = parser.parse_args()
    if args.show:
        show(Book(**json.loads(args.show.read_text(encoding="utf-8"))))
        return

    from eyas.target.smollm2 import smollm2_folder

    target = smollm2_folder()
    prompts = encode(target)
    if max(args.concurrency) > len(prompts):
        raise SystemExit(f"there are {len(prompts)} prompts, so concurrency ends there")
    with drafter_folder(args.drafter, target) as drafter:
        peers = start(commands(args, target, drafter), args.threads)
        expected = sum(args.accept_rate**i for i in range(args.draft_tokens + 1))
        about = {
            "machine": provenance(),
            "tokens": args.tokens,
            "concurrency": args.concurrency,
            "draft_tokens": args.draft_tokens,
            "drafter": str(args.drafter.name)
            if args.drafter
            else f"untrained; where acceptance is scripted, each position of the chain of "
            f"{args.draft_tokens} has rate {args.accept_rate}, an acceptance length of {expected:.2f} for all of it",
            "contenders": {name: peer.about for name, peer in peers.items()},
        }
        book = Book(about, {}, args.out)
        try:
            measure(peers, prompts, book, args)
        finally:
            for peer in peers.values():
                peer.end()
    show(book)


if __name__ == "__main__":
    main()
