"""Is the choice of ``eyas tune`` the best? Every shape of a modest grid is measured beside it, in interleaved rounds.

    python benchmarks/tune_exhaustive.py --out build/tune

``eyas tune`` runs first and chooses; then the choice, drafting nothing and every shape of the grid take turns for
``--rounds`` at each concurrency. Printed is what the choice loses against the best of them, with a 95% interval from
resampling whole rounds, in which the best is found anew in every resample: being the best of many by luck is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import numpy as np
from side_by_side import provenance

from eyas.bench.grid import Contender, Variant
from eyas.bench.journal import Memo
from eyas.bench.pairing import Plan
from eyas.bench.passes import Level
from eyas.bench.tune import Course, Search, as_record
from eyas.bench.workload import builtin
from eyas.cli.eval import choose_drafter, grid_of
from eyas.cli.main import main as eyas
from eyas.cli.options import EngineFlags, LoadingFlags
from eyas.cli.tune import in_process
from eyas.core import DraftShape, SamplingParams

BAR = 0.03
RESAMPLES = 10_000


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--target", default="smollm2")
    flags.add_argument("--drafter", default=None, help="by default the one that comes with Eyas")
    flags.add_argument("--concurrency", default="1,8,32")
    flags.add_argument("--steps", default="1,2,3,4,5")
    flags.add_argument("--topk", default="1,4")
    flags.add_argument("--draft-tokens", default="8")
    flags.add_argument("--rounds", type=int, default=10)
    flags.add_argument("--num-prompts", type=int, default=None)
    flags.add_argument("--output-len", type=int, default=128)
    flags.add_argument("--task", action="append", default=None, help="of the built-in prompts (repeatable)")
    flags.add_argument("--out", type=Path, required=True, help="a folder; what is there is gone on with")
    asked = flags.parse_args()
    chosen = tuned(asked)
    rounds = exhaustive(asked, chosen)
    print(provenance())
    for level, by_name in rounds.items():
        show(level, str(chosen[level]), by_name)


def tuned(asked: argparse.Namespace) -> dict[int, Contender]:
    """What ``eyas tune`` chooses, run once: its exit code is about whether drafting pays, not about the choice."""
    folder = asked.out / "tune"
    command = ["tune", asked.target, "--concurrency", asked.concurrency, "--steps", asked.steps, "--topk", asked.topk]
    command += ["--draft-tokens", asked.draft_tokens, "--output-len", str(asked.output_len), "--out", str(folder)]
    command += ["--drafter", asked.drafter] if asked.drafter else []
    command += ["--num-prompts", str(asked.num_prompts)] if asked.num_prompts else []
    command += [part for task in asked.task or () for part in ("--task", task)]
    if not (folder / "tune.json").exists():
        try:
            eyas([*command, *(["--resume"] if (folder / "journal.jsonl").exists() else [])])
        except SystemExit as left:
            if left.code not in (0, 3, 4):
                raise
    choice = json.loads((folder / "tune.json").read_text())["choice"]
    return {
        int(level): Contender(DraftShape(**one["shape"]) if one["shape"] else None, auto=one["auto"])
        for level, one in choice.items()
    }


def exhaustive(asked: argparse.Namespace, chosen: dict[int, Contender]) -> dict[int, dict[str, list[float]]]:
    """Tokens a second of every contender by concurrency and round."""
    shapes = tuple(grid_of(asked.steps, asked.topk, asked.draft_tokens))
    contenders = list(dict.fromkeys([Contender(), *map(Contender, shapes), *chosen.values()]))
    sampling = SamplingParams(max_tokens=asked.output_len, seed=0)
    levels = tuple(Level("concurrency", level) for level in sorted(chosen))
    drafter = choose_drafter(asked.target, asked.drafter, "with --drafter")
    flags = EngineFlags(), LoadingFlags()
    subject = in_process(asked.target, drafter, sampling, shapes, max(chosen), *flags, debug=False)
    search = Search(shapes, (Variant(),), Plan(levels, sampling, asked.rounds, asked.num_prompts))
    journal = asked.out / "exhaustive.jsonl"
    settings = {"contenders": [as_record(one) for one in contenders], "output_len": asked.output_len}
    memo = Memo(journal, settings, resume=journal.exists())
    course = Course(subject, builtin(asked.task or ()), search, memo, lambda what: print(what, file=sys.stderr))
    labels = [f"round {turn + 1}" for turn in range(asked.rounds)]
    course.ahead = len(labels) * len(contenders) * len(levels)

    async def measure() -> None:
        try:
            for turn, label in enumerate(labels):
                await course.round(label, turn, contenders)
        finally:
            await subject.close()

    asyncio.run(measure())
    return {
        level: {str(one): [course.records(one, label)[level]["speed"] for label in labels] for one in contenders}
        for level in sorted(chosen)
    }


def show(level: int, choice: str, by_name: dict[str, list[float]]) -> None:
    names, logs = list(by_name), np.log(np.array(list(by_name.values())))  # [contender, round]
    means, mine = logs.mean(axis=1), names.index(choice)
    drawn = np.random.default_rng(0).integers(logs.shape[1], size=(RESAMPLES, logs.shape[1]))
    resampled = logs[:, drawn].mean(axis=2)
    losses = 1 - np.exp(resampled[mine] - resampled.max(axis=0))
    loss = 1 - np.exp(means[mine] - means.max())
    low, high = np.quantile(losses, (0.025, 0.975))
    print(f"\nconcurrency {level}: tune chose {choice}")
    for name in sorted(names, key=lambda name: -means[names.index(name)]):
        print(f"  {np.exp(means[names.index(name)]):9.1f} tok/s  {name}{'  <- tune' if name == choice else ''}")
    met = "met" if loss <= BAR else "MISSED"
    print(f"  loss against the best {loss:.1%} [{low:.1%}, {high:.1%}]; bar {BAR:.0%}: {met}")


if __name__ == "__main__":
    main()
