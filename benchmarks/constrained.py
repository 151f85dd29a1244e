"""Structured outputs with and without speculation: always valid, and still faster?

    python benchmarks/constrained.py [--schemas 200] [--together 16] [--rounds 1] [--drafter FOLDER] [--out FILE]

SmolLM2 writes JSON for random schemas (those of the tests), greedily and sampled by turns, ``--together`` at once. Each
company of them is asked four times a round: constrained and free, each with a chain and plainly, in an order that turns
from company to company. Printed are how many answers were finished and valid, whether speculation left the text as it
was (below float32 near-ties may differ), acceptance lengths, and tokens a second with the ratios' 95% intervals over
companies. Results are written to ``--out`` after every company: a run that is cut short is not lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import jsonschema
import torch
from side_by_side import provenance, show_ratio, turned

import eyas
from eyas.bench.benchmark import write
from eyas.core import DraftShape, Request, SamplingParams, StructuredOutputsParams
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
    seconds: float  # of its whole company, prompts included
    steps: int  # verify steps
    emitted: int  # tokens of these steps


def ask(llm: LLM, company: Mapping[int, dict[str, Any]], way: str, max_tokens: int) -> list[Answer]:
    """The answers to some schemas by their numbers, all at a time. Their grammars are compiled before."""
    numbers, requests = list(company), [request(llm, *one, way, max_tokens) for one in company.items()]
    begin = time.perf_counter()
    outputs = list(llm.stream_all(requests))
    seconds = time.perf_counter() - begin
    made = []
    for number, asked in zip(numbers, requests, strict=True):
        own = [output for output in outputs if output.request_id == asked.id]
        text, last = "".join(output.text for output in own), own[-1]
        assert last.finish_reason is not None and last.stats is not None
        tokens, fine = sum(len(output.emitted) for output in own), valid(text, company[number])
        stats = last.stats
        made.append(Answer(number, way, text, tokens, last.finish_reason, fine, seconds, stats.steps, stats.emitted))
    return made


def request(llm: LLM, number: int, schema: dict[str, Any], way: str, max_tokens: int) -> Request:
    content = f"Write an example of JSON for this JSON schema:\n{json.dumps(schema)}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    outputs = StructuredOutputsParams(json=schema) if way.startswith("constrained") else None
    if outputs is not None:
        llm.engine.grammars.compile(outputs)
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {}
    sampling = SamplingParams(max_tokens=max_tokens, structured_outputs=outputs, **drawn)  # type: ignore[arg-type]
    return replace(llm.request(messages, sampling), speculate=way.endswith("chain"))


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
        speed = sum(a.tokens for a in found) / max(sum({a.seconds for a in found}), 1e-9)
        length = f"{emitted / steps:.2f}" if steps and way.endswith("chain") else "-"
        print(f"{way:<20} {len(found):>8} {len(done):>9} {sum(a.valid for a in done):>15} {length:>18} {speed:>9.1f}")
    for kind in ("constrained", "free"):
        chain, plain = (of[f"{kind} {what}"] for what in ("chain", "plain"))
        differ = sum(a.text != b.text for a, b in zip(chain, plain, strict=True))
        print(f"{kind}: {differ} of {len(chain)} texts differ between chain and plain")
        speeds = [companies(answers) for answers in (chain, plain)]
        show_ratio(f"{kind}: speedup by speculation, {len(speeds[0])} companies", *speeds)


def companies(answers: Sequence[Answer]) -> list[float]:
    """Tokens a second of each company; its time tells them apart."""
    return [sum(a.tokens for a in own) / seconds for seconds, own in groupby(answers, lambda a: a.seconds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default=str(DRAFTER))
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
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
        max_running_requests=args.together,
        context_length=2048,
    )
    print(f"{args.target}, {llm.target.dtype}, chain of {args.steps}; {provenance()}")
    answers: list[Answer] = []
    made = dict(enumerate(schemas(args.schemas)))
    for way in WAYS:  # warm
        ask(llm, {0: made[0]}, way, 8)
    begin = time.perf_counter()
    for turn in range(args.rounds):
        for number, start in enumerate(range(0, len(made), args.together)):
            company = {n: made[n] for n in range(start, min(start + args.together, len(made)))}
            for way in turned(WAYS, turn + number):
                answers += ask(llm, company, way, args.tokens)
            if args.out:
                write(args.out, json.dumps([asdict(answer) for answer in answers], indent=1))
    print(f"{time.perf_counter() - begin:.0f} s")
    show(answers)


if __name__ == "__main__":
    main()
