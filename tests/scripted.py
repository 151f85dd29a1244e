"""A drafter that knows the true continuation and errs where it is told to: every accept length, every roll-back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from eyas.core import Draft, DraftShape
from eyas.drafter.contract import SequenceView, TrueStates


class ScriptedDrafter:
    """Drafts ``truth`` (the whole answer), wrong at depth ``errs(step)`` (0: right everywhere), as a chain or a tree.

    In a tree the true path lies among decoys, at a node index that changes with every step. It also checks what it is
    fed: the right number of states, in order, without gaps, and the tokens that really followed.
    """

    def __init__(
        self,
        truth: Sequence[int],
        prompt: Sequence[int],
        vocab: int,
        errs: Callable[[int], int],
        layer_ids: tuple[int, ...] = (0, 1, 2),
    ):
        self.truth, self.prompt, self.vocab, self.errs = list(truth), list(prompt), vocab, errs
        self.layer_ids = layer_ids
        self.steps = 0
        self.fed = 0

    def start(self, target, slots: int, rows: int) -> None:
        self.width = len(self.layer_ids) * target.hidden_size

    def clear(self, slot: int) -> None:
        pass

    def extend(self, sequence: SequenceView, true: TrueStates) -> None:
        everything = self.prompt + self.truth
        assert true.start == self.fed
        assert true.states.shape == (len(true.tokens), self.width)
        following = everything[true.start + 1 : true.start + 1 + len(true.tokens)]
        assert true.tokens.tolist()[: len(following)] == following
        self.fed += len(true.tokens)

    def propose(self, sequences: Sequence[SequenceView], shape: DraftShape) -> list[Draft]:
        return [self._propose(s, shape) for s in sequences]

    def _propose(self, sequence: SequenceView, shape: DraftShape) -> Draft:
        assert self.fed == sequence.length, "target and drafter are out of step"
        self.steps += 1
        at, wrong = sequence.output_index, min(self.errs(self.steps), shape.num_steps)
        line = [self.truth[at + d] if at + d < len(self.truth) else 0 for d in range(shape.num_steps)]
        if wrong:
            line[wrong - 1] = (line[wrong - 1] + 1) % self.vocab
        tokens, parents, depths = [sequence.last_token], [-1], [0]
        tip, spare = 0, shape.num_draft_tokens - 1 - shape.num_steps
        for depth, token in enumerate(line, start=1):
            siblings = [token]
            if shape.eagle_topk > 1:
                decoys = min(spare, shape.eagle_topk - 1, (self.steps + depth) % shape.eagle_topk)
                spare -= decoys
                siblings = [(token + 7 + i) % self.vocab for i in range(decoys)]
                siblings.insert((self.steps * depth) % (decoys + 1), token)
            here = len(tokens) + siblings.index(token)
            tokens += siblings
            parents += [tip] * len(siblings)
            depths += [depth] * len(siblings)
            tip = here
        return Draft(torch.tensor(tokens), tuple(parents), tuple(depths))
