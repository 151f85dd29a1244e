"""A drafter that knows the true continuation and errs where it is told to: every accept length, every roll-back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.core import Draft, DraftShape
from eyas.drafter.contract import TrueStates

Errs = Callable[[int], int]  # a sequence's draft number (from 1) -> the depth at which that draft is wrong; 0: nowhere


@dataclass(frozen=True)
class Script:
    """What one request's answer is, and what an independent pass over prompt and answer says of its states."""

    answer: Sequence[int]
    states: torch.Tensor | None = None  # [T, len(layer_ids) * H]
    embeds: torch.Tensor | None = None  # [T, H], what enters layer 0: for a prompt with images
    image_id: int = -1  # the token that stands for a piece of an image


class ScriptedDrafter:
    """Drafts the script of each request (by its id) with planned errors, as a chain or a tree.

    Behind an error it goes on with the truth, which must not be accepted. In a tree the true path lies among decoys, at
    node indices that change with every step, and decoys are followed by the truth too.

    It also checks what it is fed: the right number of states, in order and without gaps, the tokens that really
    followed, and, where the script has them, the states' and image embeddings' values.
    """

    def __init__(
        self,
        scripts: Mapping[str, Script],
        errs: Errs = lambda step: 0,
        *,
        vocab: int = 150,
        layer_ids: tuple[int, ...] = (0, 1, 2),
    ):
        self.scripts, self.errs, self.vocab, self.layer_ids = scripts, errs, vocab, layer_ids
        self.steps: dict[str, int] = defaultdict(int)  # by request
        self.fed: dict[int, int] = {}  # by slot: places covered

    def start(self, target: Any, slots: int, rows: int) -> None:
        self.fed = dict.fromkeys(range(slots), 0)
        self.width = len(self.layer_ids) * target.hidden_size

    def clear(self, slot: int) -> None:
        self.fed[slot] = 0

    def extend(self, sequence: Any, true: TrueStates) -> None:
        script = self.scripts[sequence.request.id]
        everything = [*sequence.request.prompt_ids, *script.answer]
        count = len(true.tokens)
        assert true.start in (0, self.fed[sequence.slot]), "a gap, or a place twice"
        assert true.states.shape == (count, self.width)
        following = everything[true.start + 1 : true.start + 1 + count]
        assert true.tokens.tolist()[: len(following)] == following, "not the tokens that followed"
        if script.states is not None:
            places = script.states[true.start : true.start + count]
            torch.testing.assert_close(true.states[: len(places)], places, rtol=1e-3, atol=1e-3)
        if script.embeds is not None and true.start == 0:
            self._check_images(script, true)
        self.fed[sequence.slot] = true.start + count

    def propose(self, sequences: Sequence[Any], shape: DraftShape) -> list[Draft]:
        return [self._propose(s, shape) for s in sequences]

    def _check_images(self, script: Script, true: TrueStates) -> None:
        assert true.image_mask is not None and true.embeds is not None and script.embeds is not None
        assert torch.equal(true.image_mask, true.tokens == script.image_id)
        after = script.embeds[1 : 1 + len(true.tokens)][true.image_mask]
        torch.testing.assert_close(true.embeds[true.image_mask], after, rtol=1e-4, atol=1e-4)

    def _propose(self, sequence: Any, shape: DraftShape) -> Draft:
        assert self.fed[sequence.slot] == sequence.length, "target and drafter are out of step"
        request = sequence.request.id
        self.steps[request] += 1
        step = self.steps[request]
        at, answer = sequence.output_index, self.scripts[request].answer
        true = [answer[at + d] if at + d < len(answer) else 0 for d in range(shape.num_steps)]
        line = list(true)
        if wrong := min(self.errs(step), shape.num_steps):
            line[wrong - 1] = (line[wrong - 1] + 1) % self.vocab
        tokens, parents, depths = [sequence.last_token], [-1], [0]
        spare = shape.num_draft_tokens - 1 - shape.num_steps  # for decoys
        tip, others = 0, []  # of the level above: the line's node, the decoys
        for depth, token in enumerate(line, start=1):
            decoys = min(spare, shape.eagle_topk - 1, (step + depth) % shape.eagle_topk)
            spare -= decoys
            level = [((token + 7 + i) % self.vocab, tip) for i in range(decoys)]
            level.insert((step * depth) % (decoys + 1), (token, tip))
            if others and spare:
                spare -= 1
                level.append((true[depth - 1], others[step % len(others)]))
            here = range(len(tokens), len(tokens) + len(level))
            tip_before = tip
            for node, (child, parent) in zip(here, level, strict=True):
                tokens.append(child)
                parents.append(parent)
                depths.append(depth)
                if child == token and parent == tip_before:
                    tip = node
            others = [node for node in here if node != tip]
        return Draft(torch.tensor(tokens), tuple(parents), tuple(depths))


def plans(num_steps: int) -> dict[str, Errs]:
    """Errors at every possible position: in turn, nowhere, and always at the same one."""
    fixed = {f"wrong at {depth}": (lambda step, depth=depth: depth) for depth in range(1, num_steps + 1)}
    return {"in turn": lambda step: step % (num_steps + 1), "always right": lambda step: 0, **fixed}
