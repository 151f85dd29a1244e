"""How the cost of a step grows with the batch, the draft and the context; and what the engine's bookkeeping takes.

    python benchmarks/growth.py [--rounds 10] [--plots docs] [--only batch draft context bookkeeping]

SmolLM2-135M-Instruct in bfloat16, steps as they are without compiling. What is compared takes turns, round by round;
points are medians and bars the middle half of the rounds. Bookkeeping is a step of 256 sequences whose target is a
stand-in that answers at once: scheduling, sampling, acceptance and all that the host does for each sequence.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from side_by_side import interleave, provenance

from eyas.core import DraftShape, Request, SamplingParams
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import untrained
from eyas.engine.engine import Engine
from eyas.target.adapter import HFTarget
from eyas.target.cache import LayerShape, SlotCache
from eyas.target.contract import TargetOutput
from eyas.target.loading import load_target
from eyas.target.tuning import pack_linears, tune

BATCHES = (1, 2, 4, 8, 16, 32)
DRAFTS = tuple(DraftShape(k, 1, k + 1) for k in (1, 2, 3, 5)) + tuple(DraftShape(4, 4, n) for n in (8, 16, 32))
CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
STEPS = 8  # timed in a row

Timed = Callable[[], float]  # milliseconds of a step


class Growth:
    def __init__(self) -> None:
        self.model = load_target("smollm2", dtype="bfloat16").model
        tune(self.model)
        self.target = HFTarget(self.model)
        self.ids = itertools.count()

    def engine(self, sequences: int, shape: DraftShape | None, context: int) -> Engine:
        drafter = None
        if shape:
            t = self.target
            model = untrained(t.hidden_size, t.num_layers, t.vocab_size, draft_vocab_size=8192, dtype=t.dtype)
            pack_linears(model)
            drafter = Eagle3Drafter(model)
        return Engine(
            self.target,
            drafter,
            shape=shape,
            context_length=context,
            max_running_requests=sequences,
            prefix_caching=False,
        )

    def step(self, sequences: int, shape: DraftShape | None, prompt: int) -> Timed:
        """Milliseconds of a decoding step with so many sequences behind prompts of this length."""
        engine = self.engine(sequences, shape, min(prompt + 1024, 8192))
        sampling = SamplingParams(max_tokens=100_000, ignore_eos=True)

        def start() -> None:
            for number in range(sequences):
                ids = [(7 * i + number) % 1000 + 100 for i in range(prompt)]
                engine.add(Request(str(next(self.ids)), ids, sampling))
            while engine.scheduler.waiting or any(not s.decoding for s in engine.scheduler.running.values()):
                engine.step()

        def timed() -> float:
            if engine.idle or min(s.room for s in engine.scheduler.running.values()) < 100:
                for sequence in list(engine.scheduler.running.values()):
                    engine.abort(sequence.request.id)
                start()
                engine.step()
            begin = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            return 1000 * (time.perf_counter() - begin) / STEPS

        return timed


class Instant:
    """A target that answers at once, always the same: what is left of a step is the engine's own."""

    vocab_size, hidden_size, num_layers, context_length = 1000, 8, 2, None
    device, dtype, row_nbytes, compilable = torch.device("cpu"), torch.float32, 64, False

    def __init__(self) -> None:
        self.logits = torch.zeros(1, 1, self.vocab_size)
        self.logits[..., 7] = 1

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int] | None) -> None: ...

    def new_cache(self, rows: int) -> SlotCache:
        return SlotCache({0: LayerShape(1, 2, 2, self.dtype, self.device)}, rows)

    def forward(self, block: Any, cache: SlotCache, *, ends: Any = None, images: Any = None) -> TargetOutput:
        batch, count = block.tokens.shape
        return TargetOutput(self.logits.expand(batch, count if ends is None else 1, -1), None)


def bookkeeping(sequences: int) -> Timed:
    engine = Engine(Instant(), context_length=4096, max_running_requests=sequences, chunked_prefill_size=1 << 20)  # type: ignore[arg-type]
    for number in range(sequences):
        engine.add(Request(str(number), [number % 999] * 20, SamplingParams(max_tokens=4000, ignore_eos=True)))
    engine.step()

    def timed() -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        return 1000 * (time.perf_counter() - begin) / STEPS

    return timed


def measure(rounds: int, contenders: Mapping[str, Timed]) -> dict[str, list[float]]:
    for work in contenders.values():
        work()
    return interleave(contenders, rounds)


def report(title: str, axis: str, results: Mapping[str, list[float]], plots: Path | None) -> None:
    print(f"\n{title}: milliseconds a step")
    for name, values in results.items():
        print(f"  {name:<28} {statistics.median(values):8.2f}  ({min(values):.2f} to {max(values):.2f})")
    if plots:
        draw(title, axis, results, plots / f"growth-{title.split()[-1]}.svg")


def draw(title: str, axis: str, results: Mapping[str, list[float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "eyas"
    from matplotlib import pyplot

    names = list(results)
    quartiles = [statistics.quantiles(results[name], n=4) for name in names]
    middle = [q[1] for q in quartiles]
    spread = [[q[1] - q[0] for q in quartiles], [q[2] - q[1] for q in quartiles]]
    figure, axes = pyplot.subplots(figsize=(6, 3.2))
    axes.errorbar(range(len(names)), middle, yerr=spread, marker="o", capsize=3)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(bottom=0)
    axes.set(xlabel=axis, ylabel="ms a step", title=title)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--plots", type=Path, help="folder for a plot of each")
    parser.add_argument("--only", nargs="+", choices=("batch", "draft", "context", "bookkeeping"))
    args = parser.parse_args()
    wanted = args.only or ("batch", "draft", "context", "bookkeeping")
    growth = Growth() if set(wanted) - {"bookkeeping"} else SimpleNamespace()
    print(provenance())
    if "bookkeeping" in wanted:
        results = measure(args.rounds, {str(n): bookkeeping(n) for n in (1, 16, 64, 256)})
        report("The engine's own bookkeeping", "sequences", results, args.plots)
    if "batch" in wanted:
        results = measure(args.rounds, {str(b): growth.step(b, None, 100) for b in BATCHES})
        report("Plain steps by batch", "sequences, each behind 100 tokens", results, args.plots)
    if "draft" in wanted:
        steps = {"plain": growth.step(1, None, 100)}
        steps |= {name(shape): growth.step(1, shape, 100) for shape in DRAFTS}
        report("Steps of one sequence by draft", "draft: steps x top-k, nodes", measure(args.rounds, steps), args.plots)
    if "context" in wanted:
        results = measure(args.rounds, {str(n): growth.step(1, None, n) for n in CONTEXTS})
        report("Plain steps of one sequence by context", "tokens before", results, args.plots)


def name(shape: DraftShape) -> str:
    return f"{shape.num_steps}x{shape.eagle_topk}, {shape.num_draft_tokens}"


if __name__ == "__main__":
    main()
