"""Eyas, plain or speculative.

    eyas_worker.py TARGET off|fixed|auto [--drafter FOLDER --draft-tokens 5 [--accept-rate 0.6]] [--threads 2]

With ``--accept-rate`` the drafter does all of its work, and then its tokens are swapped for scripted ones: each is
right with that probability.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from protocol import Clock, Prompts, Result, Round, serve, versions

from eyas.core import Draft, DraftShape, Request, SamplingParams, UsageError
from eyas.drafter.contract import Drafting, SequenceView
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model
from eyas.engine.llm import LLM, load_drafter_for
from eyas.target.adapter import HFTarget
from eyas.target.loading import load_target
from eyas.target.tuning import tune

LONGEST = 2048
SETTLED_AFTER = 6  # runs of a prompt until its text is taken as it is


class Scripted(Eagle3Drafter):
    """Drafts for real, then proposes what a drafter of some acceptance rate might have: true tokens, and wrong ones.

    ``script`` holds, by request id, an answer as it will be proposed, token by token: ``scripted`` makes it.
    """

    def __init__(self, model: Eagle3Model):
        super().__init__(model)
        self.script: dict[str, list[int]] = {}

    def propose(self, drafting: Drafting, shape: DraftShape) -> Draft:
        if shape.eagle_topk > 1:
            raise UsageError("Scripted acceptance is for chains.")
        roots = super().propose(drafting, shape).tokens[:, :1]
        coming = [self._coming(sequence, shape.num_steps) for sequence in drafting.sequences]
        return Draft(torch.cat((roots, torch.tensor(coming, device=roots.device)), dim=1))

    def _coming(self, sequence: SequenceView | None, steps: int) -> list[int]:
        if sequence is None:
            return [0] * steps
        at = len(sequence.output_ids)
        coming = self.script.get(sequence.request.id, [])[at : at + steps]
        return coming + [0] * (steps - len(coming))


def scripted(answer: Sequence[int], rate: float, draw: random.Random) -> list[int]:
    """An answer with wrong tokens in it; each is right with probability ``rate``, others in every round.

    A draft begins at a new place after each miss, so this is one acceptance rate at every position of the draft.
    """
    return [token if draw.random() < rate else (token + 1) % 1000 for token in answer]


class Eyas:
    """One engine, one round at a time."""

    def __init__(self, args: argparse.Namespace):
        loaded = load_target(args.target, dtype="bfloat16")
        tune(loaded.model)
        target = HFTarget(loaded.model)
        drafter = load_drafter_for(target, args.drafter) if args.drafter else None
        self.rate, self.draw = args.accept_rate, random.Random(0)
        self.truth: dict[tuple[int, ...], list[int]] = {}  # the answer to each prompt, by an earlier run
        self.script = Scripted(drafter.model) if args.accept_rate is not None else None
        self.llm = LLM(
            target,
            loaded.tokenizer,
            drafter=self.script or drafter,
            shape=DraftShape(args.draft_tokens, 1, args.draft_tokens + 1),
            context_length=LONGEST,
            speculation=args.speculation,
            max_running_requests=args.most,
            prefix_caching=False,  # every round asks the same prompts
        )
        if args.compile:
            self.llm.engine.compile(lambda what, share: print(what, f"{share:.0%}", file=sys.stderr, flush=True))

    def round(self, prompts: Prompts, tokens: int, warm_up: bool) -> Result:
        if self.script is None or not warm_up:
            return self.run(prompts, tokens)
        # In low precision a near-tie may make a run leave its script: what it made is the next one, until it is kept.
        for _ in range(SETTLED_AFTER):
            result = self.run(prompts, tokens)
            made = {tuple(prompt): answer for prompt, answer in zip(prompts, result.answers, strict=True)}
            if all(self.truth.get(prompt) == answer for prompt, answer in made.items()):
                break
            self.truth |= made
        return result

    def run(self, prompts: Prompts, tokens: int) -> Result:
        engine, sampling = self.llm.engine, SamplingParams(max_tokens=tokens, ignore_eos=True)
        emitted = steps = 0
        if self.script is not None:
            answers = {str(index): self.truth.get(tuple(prompt), []) for index, prompt in enumerate(prompts)}
            self.script.script = {name: scripted(answer, self.rate, self.draw) for name, answer in answers.items()}
        clock = Clock(len(prompts))
        for index, prompt in enumerate(prompts):
            engine.add(Request(str(index), prompt, sampling))
        while not engine.idle:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                clock.hear(int(output.request_id), [token.token_id for token in output.emitted])
                if output.stats is not None:
                    emitted, steps = emitted + output.stats.emitted, steps + output.stats.steps
        return clock.result(emitted / steps if steps else None)


def load(args: argparse.Namespace) -> tuple[Round, dict[str, Any]]:
    torch.set_num_threads(args.threads)
    return Eyas(args).round, {**versions("eyas", "torch", "transformers"), "threads": args.threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("speculation", choices=("off", "fixed", "auto"))
    parser.add_argument("--drafter")
    parser.add_argument("--draft-tokens", type=int, default=5, help="of the chain, root not counted")
    parser.add_argument("--accept-rate", type=float, help="acceptance rate to script, at every position")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--compile", action="store_true", help="compile steps before the first round")
    parser.add_argument("--most", type=int, default=32, help="sequences at a time")
    args = parser.parse_args()
    serve(lambda: load(args))


if __name__ == "__main__":
    main()
