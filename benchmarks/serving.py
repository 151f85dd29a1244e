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
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers.prompts import PROMPTS
from side_by_side import Book, only, provenance, show_ratio, turned
from workers import Worker, WorkerError

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


def take_round(worker: Worker, prompts: Sequence[Sequence[int]], tokens: int, warm_up: bool) -> dict[str, Any]:
    """One round, as ``peers/protocol.py`` has it. Raises WorkerError, also where tokens are missing."""
    result = worker.tell({"prompts": prompts, "tokens": tokens, "warm_up": warm_up})
    found = {len(answer) for answer in result["answers"]}
    if found != {tokens}:
        raise WorkerError(f"{worker.name} made {sorted(found)} tokens instead of {tokens} ({worker.log})")
    return result


def commands(args: argparse.Namespace, target: Path, drafter: Path) -> dict[str, list[str]]:
    """Every contender's command line. Without a trained drafter, one is made to accept as one would."""

    def worker(python: Path | str, name: str, *rest: str) -> list[str]:
        script = str(HERE / "peers" / f"{name}_worker.py")
        return [str(python), script, str(target), *rest, "--most", most, "--threads", str(args.threads)]

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
    return only(found, args.only)


def entry(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the book keeps of a round."""
    answers = result["answers"]
    return {
        "seconds": result["seconds"],
        "tokens": sum(map(len, answers)),
        "first": result["first"],
        "gaps": [
            (last - first) / max(len(answer) - 1, 1)
            for first, last, answer in zip(result["first"], result["last"], answers, strict=True)
        ],
        "acceptance_length": result["acceptance_length"],
    }


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


def start(commands: Mapping[str, Sequence[str]], threads: int) -> dict[str, Worker]:
    """One after another: loading and compiling disturb nobody then. Whoever fails is left out, and said so."""
    peers, environment = {}, {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    for name, command in commands.items():
        print(f"starting {name} ...", file=sys.stderr, flush=True)
        try:
            peers[name] = Worker(name, command, environment)
        except (WorkerError, OSError) as error:
            print(f"left out: {error}", file=sys.stderr)
    return peers


def measure(peers: dict[str, Worker], prompts: list[list[int]], book: Book, args: argparse.Namespace) -> None:
    """Warm-up, then the rounds; whoever fails is out from there on. ``peers`` loses those."""

    def take_turn(name: str, concurrency: int, warm_up: bool = False) -> None:
        try:
            result = take_round(peers[name], prompts[:concurrency], args.tokens, warm_up)
        except WorkerError as error:
            print(f"out at {concurrency}: {error}", file=sys.stderr)
            peers.pop(name).end()
        else:
            if not warm_up:
                book.enter(name, concurrency, entry(result))

    for name in list(peers):
        for concurrency in args.concurrency:
            for _ in range(args.warm_ups):
                if name in peers:
                    print(f"warming up {name} at {concurrency} ...", file=sys.stderr, flush=True)
                    take_turn(name, concurrency, warm_up=True)
    for turn in range(args.rounds):
        for concurrency in args.concurrency:
            for name in turned(list(peers), turn):
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
        print(f"\nConcurrency {concurrency}\n{HEAD}")
        for name in book.rounds:
            _show_row(book, name, concurrency)
    print("\nRatios of output speed: median of the rounds' ratios [95% interval], and the bar")
    for bar in BARS:
        for concurrency in about["concurrency"]:
            if not bar.at or concurrency in bar.at:
                _show_bar(book, bar, concurrency)
    _show_step(book, about["draft_tokens"])


def _show_row(book: Book, name: str, concurrency: int) -> None:
    entries, speeds = book.of(name, concurrency), _speeds(book, name, concurrency)
    if not entries:
        return
    first, gaps = (1000 * np.asarray([v for one in entries for v in one[what]]) for what in ("first", "gaps"))
    known = [one["acceptance_length"] for one in entries if one["acceptance_length"] is not None]
    tau = f"{statistics.mean(known):.2f}" if known else ""
    span = f"({min(speeds):.1f} to {max(speeds):.1f})"
    print(
        f"{name:<36} {statistics.median(speeds):8.1f} {span:>18} {np.median(first):15.1f} "
        f"{np.quantile(first, 0.95):8.1f} {np.median(gaps):11.2f} {tau:>14} {len(speeds):6d}"
    )


def _speeds(book: Book, name: str, concurrency: int) -> list[float]:
    """Output tokens a second of all prompts together, by round."""
    return [one["tokens"] / one["seconds"] for one in book.of(name, concurrency)]


def _show_bar(book: Book, bar: Bar, concurrency: int) -> None:
    over, under = (_speeds(book, name, concurrency) for name in (bar.over, bar.under))
    count = min(len(over), len(under))  # who is out is out for good, so rounds stay pairs
    if count:
        text = f"bar >= {bar.least}" if bar.least is not None else ""
        show_ratio(f"{bar.over} / {bar.under} at {concurrency}", over[:count], under[:count], text)


def _show_step(book: Book, draft_tokens: int) -> None:
    """A step's time, from the time between tokens and the tokens a step made."""
    pairs = zip(book.of(FIXED, 1), book.of(PLAIN, 1), strict=False)
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
        show(Book.read(args.show))
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
        book = Book(about, path=args.out)
        try:
            measure(peers, prompts, book, args)
        finally:
            for peer in peers.values():
                peer.end()
    show(book)


if __name__ == "__main__":
    main()
