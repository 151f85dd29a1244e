"""Training a drafter: Eyas, speculators and a plain loop side by side, in tokens a second and memory.

    python benchmarks/training.py --data FOLDER [--rounds 10] [--updates 4] [--only NAME ...] [--out FILE]

The same target, rows, batches, unroll steps and draft vocabulary for all. Every contender is a process of its own that
loads once; in a round each of them makes the same updates, beginning with another one each time. Whoever does not have
its turn is stopped by a signal. README.md says what the contenders are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peers.training_protocol import Task
from side_by_side import provenance, show_medians, show_ratio, turned
from workers import Worker, WorkerError

from eyas.bench.benchmark import write

HERE = Path(__file__).resolve().parent
EYAS, PLAIN, SPECULATORS = "Eyas", "plain loop", "speculators"
BAR = 1.3  # of Eyas's tokens a second over a peer's


def make_task(args: argparse.Namespace, target: Path) -> Task:
    """The batches that ``eyas train`` would make of the data, and its draft vocabulary."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from eyas.drafter.config import default_layer_ids
    from eyas.engine.llm import eos_ids
    from eyas.training import vocabulary
    from eyas.training.batches import Course
    from eyas.training.dataset import Dataset

    data, config = Dataset.open(args.data), AutoConfig.from_pretrained(target)
    found = vocabulary.survey(data, config.max_position_embeddings)
    model = SimpleNamespace(generation_config=GenerationConfig.from_pretrained(target))
    ends = eos_ids(model, AutoTokenizer.from_pretrained(target))
    ids = vocabulary.choose(found.counts, args.draft_vocabulary, ends)
    course = Course(found.rows, found.lengths, tokens=args.batch_tokens, seed=0, epochs=1, group=1)
    wanted = (args.warm_ups + args.rounds) * args.updates
    if course.steps < wanted:
        raise SystemExit(f"{args.data} makes {course.steps} batches, and {wanted} are needed: make more data")
    rows = [[data[row] for row in course[step][0]] for step in range(wanted)]
    return Task(
        target=str(target),
        data=str(args.data),
        layer_ids=list(default_layer_ids(config.num_hidden_layers)),
        draft_ids=ids.tolist(),
        unroll=args.unroll,
        batch_tokens=args.batch_tokens,
        threads=args.threads,
        batches=[[(row.ids.tolist(), row.mask.tolist()) for row in batch] for batch in rows],
    )


def commands(args: argparse.Namespace, file: Path) -> dict[str, list[str]]:
    scripts = {EYAS: "training_eyas.py", PLAIN: "training_plain.py", SPECULATORS: "training_speculators.py"}
    pythons = {SPECULATORS: args.speculators_python}
    return {
        name: [str(pythons.get(name, sys.executable)), str(HERE / "peers" / script), str(file)]
        for name, script in scripts.items()
        if name in (args.only or scripts) and Path(pythons.get(name, sys.executable)).exists()
    }


def measure(peers: dict[str, Worker], task: Task, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Seconds, loss, peak memory in bytes and speed of each round. Raises WorkerError."""
    results = {name: list[dict[str, Any]]() for name in peers}
    for turn in range(args.warm_ups + args.rounds):
        updates = range(turn * args.updates, (turn + 1) * args.updates)
        tokens = sum(len(ids) for number in updates for ids, _ in task.batches[number])
        for name in turned(list(peers), turn):
            found = peers[name].tell({"updates": list(updates)})
            if turn >= args.warm_ups:
                results[name].append(found | {"tokens_per_second": tokens / found["seconds"]})
        if args.out:
            write(args.out, json.dumps(results, indent=1))
        print(f"  round {turn + 1} of {args.warm_ups + args.rounds}", end="\r", file=sys.stderr, flush=True)
    return results


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    speeds = {name: [r["tokens_per_second"] for r in rounds] for name, rounds in results.items()}
    show_medians(speeds, "tokens/s")
    peaks = {name: [r["peak"] / 2**20 for r in rounds] for name, rounds in results.items()}
    show_medians({f"{name}, most memory": values for name, values in peaks.items()}, "MiB")
    for name in speeds:
        if name != EYAS and EYAS in speeds:
            show_ratio(f"{EYAS} / {name}, tokens/s", speeds[EYAS], speeds[name], f"bar >= {BAR}")
            show_ratio(f"{EYAS} / {name}, most memory", peaks[EYAS], peaks[name], "bar <= 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder that eyas data has written for smollm2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-ups", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--updates", type=int, default=4, help="of each contender in a round")
    parser.add_argument("--unroll", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=768)
    parser.add_argument("--draft-vocabulary", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="+", choices=(EYAS, PLAIN, SPECULATORS))
    parser.add_argument(
        "--speculators-python",
        type=Path,
        default=HERE.parent / "build" / "peers-speculators" / "bin" / "python",
        help="of an environment with speculators 0.9; left out where it is not there",
    )
    parser.add_argument("--out", type=Path, help="where results are written after each round, as JSON")
    args = parser.parse_args()

    from eyas.target.smollm2 import smollm2_folder

    task, peers = make_task(args, smollm2_folder()), dict[str, Worker]()
    environment = {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    print(provenance())
    print(
        f"updates on about {args.batch_tokens} tokens, {args.unroll} unroll steps, draft vocabulary "
        f"{args.draft_vocabulary:,}, {args.threads} threads"
    )
    with tempfile.TemporaryDirectory(prefix="eyas-training-") as folder:
        file = Path(folder, "task.json")
        file.write_text(json.dumps(asdict(task)), encoding="utf-8")
        try:
            for name, command in commands(args, file).items():
                peers[name] = Worker(name, command, environment)
                print(f"{name}: {', '.join(f'{key} {value}' for key, value in peers[name].about.items())}")
            show(measure(peers, task, args))
        except WorkerError as error:
            raise SystemExit(str(error)) from error
        finally:
            for peer in peers.values():
                peer.end()


if __name__ == "__main__":
    main()
