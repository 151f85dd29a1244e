"""What a drafter should propose, from scratch: the whole sequence in every pass, one path at a time, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from eyas.core import Draft, DraftShape, SamplingParams
from eyas.drafter import eagle3
from eyas.drafter.contract import Drafting
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model
from eyas.speculation.sampling import TokenHistory, draft_scores, needs_history, rows_of
from eyas.speculation.top import largest
from eyas.speculation.tree import Frontier, TreeBuilder

Level = tuple[Tensor, Tensor]  # of one sequence: paths [F, depth], and scores [F, D] of what may follow


@dataclass
class Chooser:
    """How a sequence chooses its next token, with what penalties must know."""

    sampling: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    vocab: int
    stop_ids: tuple[int, ...] = ()

    @property
    def output_index(self) -> int:
        return len(self.output)

    @property
    def history(self) -> TokenHistory | None:
        if not needs_history(self.sampling):
            return None
        return TokenHistory.from_tokens(self.prompt, self.output, self.vocab)


@dataclass
class Slow:
    """A drafter of one sequence. ``states`` [T, ...] and ``embeds`` [T, H], of the token after each, are the truth."""

    model: Eagle3Model
    states: Tensor
    embeds: Tensor

    @torch.no_grad()
    def scores(self, known: int, chooser: Chooser, path: Sequence[int]) -> Tensor:
        """float32 [D]: log-probabilities, noise included, of what the target says after ``path``.

        known: how many places have a true state.
        """
        after = self.model.embed(torch.tensor([list(path)], dtype=torch.long))
        embeds = torch.cat([self.embeds[None, :known], after], dim=1)
        hidden = self.model.fuse(self.states[None, :known])
        for length in range(known, known + len(path) + 1):
            out = self.model(embeds[:, :length], hidden, torch.arange(length)[None])
            hidden = torch.cat([hidden, out.next_hidden[:, -1:]], dim=1)
        logits = self.model.logits(out.normed[:, -1:])
        then = Chooser(chooser.sampling, chooser.prompt, [*chooser.output, *path], chooser.vocab, chooser.stop_ids)
        scores = draft_scores(logits, rows_of([then]), 0, token_ids=self.model.draft_to_target)
        return scores[0, 0].log_softmax(-1)

    def check(self, known: int, chooser: Chooser, levels: Sequence[Level]) -> None:
        """Every score at every depth, given the levels of one sequence."""
        for depth, (paths, scores) in enumerate(levels):
            assert paths.shape == (len(scores), depth)
            expected = torch.stack([self.scores(known, chooser, path) for path in paths.tolist()])
            assert torch.equal(scores.isfinite(), expected.isfinite())
            torch.testing.assert_close(scores, expected, rtol=1e-4, atol=2e-3)


class Watch:
    """Keeps what the choices of a run-time drafter are made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.draft: Draft
        self._paths: list[Tensor] = []  # of a tree, level by level: [B, F, depth]
        self._scores: list[Tensor] = []  # [B, F, D]
        watch = self

        class Recorder(TreeBuilder):
            def expand(self, scores: Tensor, token_ids: Tensor | None = None) -> Frontier:
                watch._paths.append(self.paths())
                watch._scores.append(scores)
                return super().expand(scores, token_ids)

        def recorder(scores: Tensor) -> tuple[Tensor, Tensor]:
            watch._scores.append(scores)
            return largest(scores)

        monkeypatch.setattr(eagle3, "TreeBuilder", Recorder)
        monkeypatch.setattr(eagle3, "largest", recorder)

    def propose(self, drafter: Eagle3Drafter, drafting: Drafting, shape: DraftShape) -> Draft:
        self._paths, self._scores = [], []
        self.draft = drafter.propose(drafting, shape)
        assert len(self._scores) == shape.num_steps
        if shape.eagle_topk == 1:
            best = torch.cat(self._scores, dim=1).argmax(-1)
            assert torch.equal(self.draft.tokens[:, 1:], drafter.model.draft_to_target[best])
        return self.draft

    def levels(self, row: int) -> list[Level]:
        """Of one sequence of the last draft."""
        tokens = self.draft.tokens[row : row + 1]
        paths = [tokens[:, 1 : 1 + depth] for depth in range(len(self._scores))]
        if self.draft.parents is not None:
            paths = [level[row] for level in self._paths]
        return [(path, scores[row].log_softmax(-1)) for path, scores in zip(paths, self._scores, strict=True)]
