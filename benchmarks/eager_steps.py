"""Eager decoding on SmolLM2, batch 1: what a speculative step costs, and what it buys against transformers.

    python benchmarks/eager_steps.py [--rounds 10] [--tokens 96] [--dtype bfloat16]

No trained drafter is needed: a draft model of the standard shape with an 8,192-token vocabulary does all of its work,
and the tokens it is credited with are scripted, so that the acceptance length is exactly what is asked for. Contenders
take turns round by round; the table gives medians and the ratios' 95% intervals.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from side_by_side import interleave, provenance, show_medians, show_ratio, timed

from eyas.core import Draft, DraftShape, Request, SamplingParams
from eyas.drafter.contract import Drafting
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model, untrained
from eyas.engine.engine import Engine
from eyas.target.adapter import HFTarget
from eyas.target.loading import load_target

PROMPT = "Explain to a ten-year-old how a falcon catches its prey, and why it is so fast."
DRAFT_VOCABULARY = 8192
GENERATE, PLAIN = "transformers generate", "Eyas plain"
SHAPES = {
    "Eyas chain 5, acceptance length 2.5": DraftShape(5, 1, 6),
    "Eyas chain 3, acceptance length 2.5": DraftShape(3, 1, 4),
    "Eyas chain 2, acceptance length 2.5": DraftShape(2, 1, 3),
    "Eyas tree of 8 (3 steps, top-k 4), acceptance length 2.5": DraftShape(3, 4, 8),
}


class Credited(Eagle3Drafter):
    """Drafts for real, then swaps in true tokens so that one and two of them, by turns, are accepted."""

    def __init__(self, model: Eagle3Model, truth: Sequence[int]):
        super().__init__(model)
        self.truth, self.steps = truth, 0

    def propose(self, drafting: Drafting, shape: DraftShape) -> Draft:
        """For the one sequence there is."""
        draft = super().propose(drafting, shape)
        (sequence,) = drafting.sequences
        self.steps += 1
        at, hits = len(sequence.output_ids), 1 + self.steps % 2
        tokens, tip = draft.tokens[0].tolist(), 0
        chain = range(len(tokens))
        depths = chain if draft.depths is None else draft.depths[0].tolist()
        parents = [node - 1 for node in chain] if draft.parents is None else draft.parents[0].tolist()
        for node in range(1, len(tokens)):
            depth = depths[node]
            at_tip = parents[node] == tip
            right = self.truth[at + depth - 1] if at + depth - 1 < len(self.truth) else -1
            if at_tip and depth <= hits:
                tokens[node], tip = right, node
            elif at_tip or tokens[node] == right:
                tokens[node] = (right + 1) % 1000
        return Draft(torch.tensor([tokens]), draft.parents, draft.depths)


class Bench:
    """The contenders over one prompt, and what their runs made."""

    def __init__(self, dtype: str, tokens: int):
        loaded = load_target("smollm2", dtype=dtype)
        self.model, self.tokens = loaded.model, tokens
        messages = [{"role": "user", "content": PROMPT}]
        encoded = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        self.ids = list(encoded["input_ids"])
        self.target = HFTarget(self.model)
        self.step_ms: dict[str, list[float]] = defaultdict(list)
        self.answers: dict[str, list[int]] = {}
        self.per_step: dict[str, float] = {}
        self.engines = {PLAIN: self.engine(None)}
        self.run(PLAIN)
        for name, shape in SHAPES.items():
            self.engines[name] = self.engine(shape)
            self.settle(name)
        self.step_ms.clear()

    def engine(self, shape: DraftShape | None) -> Engine:
        if shape is None:
            return Engine(self.target, context_length=2048)
        t = self.target
        sizes = {"draft_vocab_size": DRAFT_VOCABULARY, "dtype": t.dtype}
        model = untrained(t.hidden_size, t.num_layers, t.vocab_size, **sizes)
        return Engine(t, Credited(model, self.answers[PLAIN]), shape=shape, context_length=2048)

    def run(self, name: str) -> float:
        """Decodes; tokens per second after the first."""
        engine = self.engines[name]
        if engine.drafter:
            engine.drafter.steps = 0
        engine.add(Request("0", self.ids, SamplingParams(max_tokens=self.tokens, ignore_eos=True)))
        answer = [t.token_id for output in engine.step() for t in output.emitted]  # the prompt
        steps, begin = 0, time.perf_counter()
        while not engine.idle:
            answer += [t.token_id for output in engine.step() for t in output.emitted]
            steps += 1
        seconds = time.perf_counter() - begin
        self.answers[name], self.per_step[name] = answer, (self.tokens - 1) / steps
        self.step_ms[name].append(1000 * seconds / steps)
        return (self.tokens - 1) / seconds

    def settle(self, name: str) -> None:
        """In low precision near-ties make a run leave its script: what it made is the next one, until it is kept."""
        self.run(name)
        while self.answers[name] != self.engines[name].drafter.truth:
            self.engines[name].drafter.truth = self.answers[name]
            self.run(name)

    def generate(self, **how: int) -> float:
        """transformers' own decoding; tokens per second after the first."""
        inputs = torch.tensor([self.ids])
        common = {
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
            "attention_mask": torch.ones_like(inputs),
        }
        seconds = [
            timed(partial(self.model.generate, inputs, max_new_tokens=count, **common, **how))
            for count in (1, self.tokens)
        ]
        return (self.tokens - 1) / (seconds[1] - seconds[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()

    bench = Bench(args.dtype, args.tokens)
    contenders = {
        GENERATE: bench.generate,
        f"{GENERATE}, prompt lookup 5": partial(bench.generate, prompt_lookup_num_tokens=5),
    }
    for work in contenders.values():
        work()  # warm-up; the engines had theirs
    contenders |= {name: partial(bench.run, name) for name in bench.engines}
    speeds = interleave(contenders, args.rounds)

    print(
        f"SmolLM2-135M-Instruct {args.dtype}, {len(bench.ids)} prompt tokens, {args.tokens} new, {args.rounds} rounds"
    )
    print(provenance())
    print("\nDecoding speed")
    show_medians(speeds, "tok/s")
    print(f"\nAgainst {GENERATE}, same dtype, eager")
    for name in speeds:
        show_ratio(name, speeds[name], speeds[GENERATE])
    print("\nTime of a step")
    show_medians(bench.step_ms, "ms")
    for name in SHAPES:
        show_ratio(f"{name} / plain", bench.step_ms[name], bench.step_ms[PLAIN])
    print("\nTokens a step, as scripted:", ", ".join(f"{bench.per_step[name]:.2f}" for name in SHAPES))


if __name__ == "__main__":
    main()
