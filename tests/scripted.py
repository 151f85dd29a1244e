"""A drafter that knows the true continuation and errs where it is told to: every accept length, every roll-back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from eyas.core import Draft, DraftShape
from eyas.drafter.contract import Drafting, SequenceView, TrueStates, drafted_rows

Errs = Callable[[int], int]  # a sequence's draft number (from 1) -> the depth at which that draft is wrong; 0: nowhere


class Wrong(BaseException):
    """A drafter was fed or proposed what it should not. No Exception: an engine may go on without one that fails."""


def loudly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, whose failures nobody overlooks."""

    @wraps(method)
    def checked(*args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error

    return checked


@dataclass(frozen=True)
class Script:
    """What one request's answer is, and what an independent pass over prompt and answer says of its states."""

    answer: Sequence[int]
    states: torch.Tensor | None = None  # [T, len(layer_ids) * H]
    embeds: torch.Tensor | None = None  # [T, H], what enters layer 0: for a prompt with images
    image_id: int = -1  # the token that stands for a piece of an image


@dataclass(frozen=True)
class Place:
    """What the drafter was told of one place of a sequence."""

    following: int  # the token one place after
    state: torch.Tensor
    image: torch.Tensor | None = None  # the embedding of the token after, where it is a piece of an image


@dataclass
class Tree:
    """A draft while it grows, padded at the end."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])

    def pad(self, count: int) -> None:
        missing = count - len(self.tokens)
        self.tokens += missing * [0]
        self.parents += missing * [-1]
        self.depths += missing * [0]


class ScriptedDrafter:
    """Drafts the script of each request (by its id) with planned errors, as a chain or a tree.

    Behind an error it goes on with the truth, which must not be accepted. In a tree the true path lies among decoys, at
    node indices that change with every step, and decoys are followed by the truth too.

    It also checks what it is fed: the right number of states, in order and without gaps, the tokens that really
    followed, and, where the script has them, the states' and image embeddings' values. What lies in a slot is looked at
    when its sequence is drafted for: only then is it known whose it is. What is not right raises ``Wrong``.
    """

    row_nbytes = 1

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

    def start(self, target: Any, rows: int) -> None:
        self.width = len(self.layer_ids) * target.hidden_size
        self.rows, self.length = rows, rows
        self.fed: list[list[Place]] = [[]]  # by slot

    @loudly
    def layout(self, slots: int, length: int, used: tuple[int, int] | None = None) -> None:
        assert slots * length <= self.rows
        self.length = length
        self.fed = [places[:length] for places in self.fed[:slots]]
        self.fed += [[] for _ in range(slots - len(self.fed))]

    def copy(self, source: int, dest: int, rows: int) -> None:
        self.fed[dest] = self.fed[source][:rows]

    def clear(self, slot: int, count: int = 1) -> None:
        self.fed[slot : slot + count] = [[] for _ in self.fed[slot : slot + count]]

    @loudly
    def extend(self, true: TrueStates) -> None:
        batch, count = true.tokens.shape
        assert true.states.shape == (batch, count, self.width)
        assert true.starts.shape == true.counts.shape == (batch,) and true.slot + batch <= len(self.fed)
        starts, counts = true.starts.tolist(), true.counts.tolist()
        assert max(starts) + count <= true.length <= self.length, "rows that nobody looks at"
        for row, (start, new) in enumerate(zip(starts, counts, strict=True)):
            if new == 0:
                continue
            assert 0 <= new <= count
            places = self.fed[true.slot + row]
            assert start <= len(places), "a gap"
            places[start:] = [self._place(true, row, i) for i in range(new)]

    @loudly
    def propose(self, drafting: Drafting, shape: DraftShape) -> Draft:
        sequences, lengths, roots = drafting.sequences, drafting.lengths.tolist(), drafting.roots.tolist()
        assert len(sequences) == len(lengths) == len(roots) == drafting.rows.count <= len(self.fed)
        assert max(lengths) + drafted_rows(shape) <= drafting.length <= self.length, "no room to draft in"
        trees = [Tree([root]) for root in roots]
        for slot, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
            if sequence is not None:
                assert lengths[slot] == sequence.length and roots[slot] == sequence.output_ids[-1]
                self._check(self.fed[slot], sequence)
                self._draft(tree, sequence, shape)
        for tree in trees:
            tree.pad(shape.num_draft_tokens)
        columns = zip(*((tree.tokens, tree.parents, tree.depths) for tree in trees), strict=True)
        tokens, parents, depths = (torch.tensor(column, device=drafting.roots.device) for column in columns)
        return Draft(tokens) if shape.eagle_topk == 1 else Draft(tokens, parents, depths)

    def _place(self, true: TrueStates, row: int, i: int) -> Place:
        image = None
        if true.image_mask is not None and true.image_mask[row, i]:
            assert true.embeds is not None
            image = true.embeds[row, i].clone()
        return Place(int(true.tokens[row, i]), true.states[row, i].clone(), image)

    def _check(self, places: list[Place], sequence: SequenceView) -> None:
        script = self.scripts[sequence.request.id]
        assert len(places) == sequence.length, "target and drafter are out of step"
        after = [*sequence.request.prompt_ids, *script.answer][1 : 1 + len(places)]
        assert [place.following for place in places][: len(after)] == after, "not the tokens that followed"
        if script.states is not None:
            known = script.states[: len(places)]
            states = torch.stack([place.state for place in places[: len(known)]])
            torch.testing.assert_close(states, known, rtol=1e-3, atol=1e-3)
        if script.embeds is not None:
            assert [p.image is not None for p in places] == [p.following == script.image_id for p in places]
            pieces = [(p.image, script.embeds[i]) for i, p in enumerate(places, start=1) if p.image is not None]
            for image, expected in pieces:
                torch.testing.assert_close(image, expected, rtol=1e-4, atol=1e-4)

    def _draft(self, tree: Tree, sequence: SequenceView, shape: DraftShape) -> None:
        request = sequence.request.id
        self.steps[request] += 1
        step = self.steps[request]
        at, answer = len(sequence.output_ids), self.scripts[request].answer
        true = [answer[at + d] if at + d < len(answer) else 0 for d in range(shape.num_steps)]
        line = list(true)
        if wrong := min(self.errs(step), shape.num_steps):
            line[wrong - 1] = (line[wrong - 1] + 1) % self.vocab
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
            here = range(len(tree.tokens), len(tree.tokens) + len(level))
            tip_before = tip
            for node, (child, parent) in zip(here, level, strict=True):
                tree.tokens.append(child)
                tree.parents.append(parent)
                tree.depths.append(depth)
                if child == token and parent == tip_before:
                    tip = node
            others = [node for node in here if node != tip]


def plans(num_steps: int) -> dict[str, Errs]:
    """Errors at every possible position: in turn, nowhere, and always at the same one."""
    fixed = {f"wrong at {depth}": (lambda step, depth=depth: depth) for depth in range(1, num_steps + 1)}
    return {"in turn": lambda step: step % (num_steps + 1), "always right": lambda step: 0, **fixed}
