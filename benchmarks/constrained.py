"""Structured outputs with and without speculation: always valid, and still faster?

    python benchmarks/constrained.py [--schemas 200] [--rounds 3] [--drafter FOLDER] [--out FILE]

SmolLM2 writes JSON for random schemas (those of the tests), greedily and sampled by turns, one request at a time. Every
schema is asked four times a round: constrained and free, each with a chain and plainly, in an order that turns from
schema to schema. Printed are how many answers were finished and valid, whether speculation left the text as it was
(below float32 near-ties may differ), acceptance lengths, and tokens a second with the ratios' 95% intervals over
schemas. Results are written to ``--out`` after every schema: a run that is cut short is not lost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema
import torch
from side_by_side import provenance, show_ratio

import eyas
from eyas.core import DraftShape, SamplingParams, StructuredOutputsParams
from eyas.engine.llm import LLM

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from schemas import schemas

DRAFTER = Path(__file__).parents[1] / "drafters" / "smollm2-135m-instruct-eagle3"
SYSTEM = "You answer with JSON only, and make up sensible values."
WAYS = ("constrained chain", "constrained plain", "free chain", "free plain")


@dataclass(frozen=True)
class Answer:
    schema: int
    way: str
    text: str
    tokens: int
    finish_reason: str
    valid: bool
    seconds: float  # of decoding: from the first token to the last
    steps: int  # verify steps
    emitted: int  # tokens of these steps


def ask(llm: LLM, number: int, schema: dict[str, Any], way: str, max_tokens: int) -> Answer:
    """One answer. What the first token takes, which compiles the grammar and reads the prompt, is not counted."""
    content = f"Write an example of JSON for this JSON schema:\n{json.dumps(schema)}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    outputs = StructuredOutputsParams(json=schema) if way.startswith("constrained") else None
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {}
    sampling = SamplingParams(max_tokens=max_tokens, structured_outputs=outputs, **drawn)  # type: ignore[arg-type]
    found = llm.generate(messages, sampling, speculate=way.endswith("chain"))
    return Answer(
        number,
        way,
        found.text,
        len(found.tokens),
        found.finish_reason,
        valid(found.text, schema),
        found.decode_seconds,
        found.stats.steps,
        found.stats.emitted,
    )


def valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def show(answers: Sequence[Answer]) -> None:
    of = {way: [a for a in answers if a.way == way] for way in WAYS}
    print(f"{'':<20} {'answers':>8} {'finished':>9} {'of these valid':>15} {'acceptance length':>18} {'tokens/s':>9}")
    for way, found in of.items():
        done = [a for a in found if a.finish_reason == "stop"]
        steps, emitted = sum(a.steps for a in found), sum(a.emitted for a in found)
        speed = sum(a.tokens - 1 for a in found) / max(sum(a.seconds for a in found), 1e-9)
        length = f"{emitted / steps:.2f}" if steps and way.endswith("chain") else "-"
        print(f"{way:<20} {len(found):>8} {len(done):>9} {sum(a.valid for a in done):>15} {length:>18} {speed:>9.1f}")
    for kind in ("constrained", "free"):
        chain, plain = (of[f"{kind} {what}"] for what in ("chain", "plain"))
        differ = sum(a.text != b.text for a, b in zip(chain, plain, strict=True))
        print(f"{kind}: {differ} of {len(chain)} texts differ between chain and plain")
        # of one schema the rounds' medians; short answers have hardly any decoding to time
        times: dict[int, tuple[list[float], list[float]]] = {}
        for a, b in zip(chain, plain, strict=True):
            if a.text == b.text and a.tokens >= 8:
                ours, theirs = times.setdefault(a.schema, ([], []))
                ours.append(a.seconds)
                theirs.append(b.seconds)
        if times:
            pairs = [(statistics.median(theirs), statistics.median(ours)) for ours, theirs in times.values()]
            show_ratio(f"{kind}: speedup by speculation, {len(pairs)} schemas", *zip(*pairs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default=str(DRAFTER))
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    llm = eyas.load(
        args.target,
        args.drafter,
        dtype=args.dtype,
        shape=DraftShape(args.steps, 1, args.steps + 1),
        speculation="fixed",
        max_running_requests=1,
        context_length=2048,
    )
    print(f"{args.target}, {llm.target.dtype}, chain of {args.steps}; {provenance()}")
    answers: list[Answer] = []
    made = schemas(args.schemas)
    for way in WAYS:  # warm
        ask(llm, 0, made[0], way, 8)
    begin = time.perf_counter()
    for turn in range(args.rounds):
        for number, schema in enumerate(made):
            first = (turn + number) % len(WAYS)
            answers += [ask(llm, number, schema, way, args.tokens) for way in (*WAYS[first:], *WAYS[:first])]
            if args.out:
                whole = args.out.with_suffix(".part")
                whole.write_text(json.dumps([asdict(answer) for answer in answers], indent=1))
                whole.replace(args.out)
    print(f"{time.perf_counter() - begin:.0f} s")
    show(answers)


if __name__ == "__main__":
    main()
