"""The unrolled drafter is the decoding engine's drafter: every guess, at every depth, from every place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine.harness import DRAFTERS, lively

from eyas.drafter.contract import TrueStates
from eyas.drafter.eagle3 import Eagle3Drafter, chain_tokens
from eyas.drafter.model import Eagle3Model, untrained
from eyas.training.batches import Batch, pack
from eyas.training.dataset import Row
from eyas.training.features import Features, Labels
from eyas.training.unroll import unroll

VOCAB, HIDDEN, STEPS = 60, 32, 4
KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "reduced vocabulary": {"draft_vocab_size": 25},
    "two layers, all norms": DRAFTERS["two layers, all norms"],
    "biases, llama3 RoPE, many heads": {
        "attention_bias": True,
        "num_attention_heads": 8,
        "head_dim": 4,
        "num_key_value_heads": 2,
        "rope": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


def model_of(kind: str = "standard") -> Eagle3Model:
    model = lively(untrained(HIDDEN, 8, VOCAB, **KINDS[kind]))
    generator = torch.Generator().manual_seed(1)
    size = model.config.draft_vocab_size
    model.draft_to_target.copy_(torch.randperm(VOCAB, generator=generator)[:size].sort().values)
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    model.bind(embed, embed)
    return model


def rows_for(model: Eagle3Model, masks: list[str], seed: int = 0) -> list[Row]:
    """Random rows of the draft vocabulary; a mask is a string, x where the target wrote."""
    random = np.random.default_rng(seed)
    ids = model.draft_to_target.numpy()
    return [Row(random.choice(ids, len(m)).astype(np.int32), np.array([c == "x" for c in m])) for m in masks]


MASKS = ["...xxxxxxxxxx", "..xxx..xxxxx", "xxxxxxx", ".xx..x.xxxx", "...xx"]


def features_of(model: Eagle3Model, batch: Batch) -> Features:
    """Made-up states, and labels that are only numbered: 1,000 * line + place."""
    generator = torch.Generator().manual_seed(2)
    lines, count = batch.tokens.shape
    states = torch.randn(lines, count, model.config.num_aux * HIDDEN, generator=generator)
    number = 1000 * torch.arange(lines)[:, None] + torch.arange(count)
    empty = torch.empty(0)
    return Features(batch, states, Labels(empty, empty, empty), number)


class Engine:
    """The run-time drafter, fed one row's true states up to a place, and made to draft the row's own tokens."""

    def __init__(self, model: Eagle3Model):
        self.model = model
        self.drafter = Eagle3Drafter(model)

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.model._borrowed_embedding
        assert weight is not None
        return weight, weight

    context_length = 64

    def guesses(self, states: torch.Tensor, tokens: torch.Tensor, place: int, steps: int) -> list[torch.Tensor]:
        """Scores at each depth of a chain rooted at token ``place`` + 1."""
        self.drafter.start(self, 64)  # type: ignore[arg-type]
        known = place + 1
        ones = torch.tensor([known])
        self.drafter.extend(TrueStates(0, 0 * ones, ones, states[None, :known], tokens[None, 1 : known + 1], known))
        views, tips = self.drafter._slots(0, 1, 64)
        found: list[torch.Tensor] = []
        columns = {int(t): column for column, t in enumerate(self.model.draft_to_target)}

        def told(logits: torch.Tensor, path: Any) -> torch.Tensor:
            found.append(logits[0, 0])
            return torch.tensor([[columns[int(tokens[(known + 1 + len(path)) % len(tokens)])]]])

        chain_tokens(self.model, views, torch.arange(64), tips, ones, steps, told)
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_the_engines(kind: str) -> None:
    model = model_of(kind)
    rows = rows_for(model, MASKS)
    batch = pack(rows, range(len(rows)))
    features = features_of(model, batch)
    with torch.no_grad():
        steps = unroll(model, features, STEPS)
    assert len(steps) == STEPS
    engine, checked = Engine(model), 0
    for number, row in enumerate(rows):
        line, first = (int(x) for x in (batch.owners == number).nonzero()[0])
        states = features.states[line, first : first + len(row.ids)]
        tokens = torch.from_numpy(row.ids).long()
        for place in range(len(row.ids) - 2):
            drafted = [j for j in range(STEPS) if row.mask[place + 1 :][: j + 2].all() and place + j + 2 < len(row.ids)]
            if not drafted:
                continue
            with torch.no_grad():
                expected = engine.guesses(states, tokens, place, len(drafted))
            for j in drafted:
                at = (steps[j].labels == 1000 * line + first + place + 1 + j).nonzero()
                # a label serves one query of each step: the one that is j + 1 places before it
                assert at.shape == (1, 1)
                with torch.no_grad():
                    scores = model.logits(steps[j].normed[at[0, 0]])
                torch.testing.assert_close(scores, expected[j], rtol=1e-4, atol=2e-5)
                checked += 1
    assert checked == sum(len(step.labels) for step in steps) > 60, "nothing else was guessed"


def test_runs_that_are_too_short_have_no_further_steps() -> None:
    model = model_of()
    batch = pack(rows_for(model, ["..xx", "..xx"]), [0, 1])
    steps = unroll(model, features_of(model, batch), STEPS)
    assert [len(step.labels) for step in steps] == [2]


def test_other_rows_and_padding_change_nothing() -> None:
    """The same row alone, and packed behind another."""
    model = model_of()
    rows = rows_for(model, MASKS)
    batch = pack(rows, range(len(rows)))
    features = features_of(model, batch)
    for number, row in enumerate(rows):
        line, first = (int(x) for x in (batch.owners == number).nonzero()[0])
        alone = pack([row], [0])
        states = features.states[line : line + 1, first : first + len(row.ids)]
        number_of = torch.arange(first, first + len(row.ids))[None] + 1000 * line
        own = unroll(model, Features(alone, states, features.labels, number_of), STEPS)
        for step, guesses in enumerate(own):
            packed = unroll(model, features, STEPS)[step]
            at = [int((packed.labels == label).nonzero()) for label in guesses.labels]
            torch.testing.assert_close(guesses.normed, packed.normed[at], rtol=1e-5, atol=1e-5)


def slow_scores(model: Eagle3Model, states: torch.Tensor, tokens: torch.Tensor, place: int, steps: int) -> torch.Tensor:
    """[steps, D]: the whole sequence anew at each depth, one place at a time, through the model's own forward."""
    hidden = model.fuse(states[None, : place + 1])
    found = []
    for depth in range(steps):
        length = place + 1 + depth
        out = model(model.embed(tokens[None, 1 : length + 1]), hidden, torch.arange(length)[None])
        found.append(model.logits(out.normed[0, -1]))
        hidden = torch.cat([hidden, out.next_hidden[:, -1:]], dim=1)
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_a_plain_loop(kind: str) -> None:
    model = model_of(kind)
    rows = rows_for(model, MASKS[:3])
    batch = pack(rows, range(len(rows)))
    features = features_of(model, batch)
    pull = torch.randn(STEPS, 4000, model.config.draft_vocab_size, generator=torch.Generator().manual_seed(5))
    fast = sum(
        (model.logits(step.normed) * pull[j, step.labels]).sum()
        for j, step in enumerate(unroll(model, features, STEPS))
    )
    slow = torch.zeros(())
    for number, row in enumerate(rows):
        line, first = (int(x) for x in (batch.owners == number).nonzero()[0])
        states, tokens = features.states[line, first : first + len(row.ids)], torch.from_numpy(row.ids).long()
        for place in range(len(row.ids) - 2):
            steps = min(STEPS, int(batch.ahead[line, first + place]) - 1)
            if steps > 0:
                at = 1000 * line + first + place + 1
                wanted = torch.stack([pull[j, at + j] for j in range(steps)])
                slow = slow + (slow_scores(model, states, tokens, place, steps) * wanted).sum()
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-3)
    weights = list(model.parameters())
    for one, other in zip(torch.autograd.grad(fast, weights), torch.autograd.grad(slow, weights), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
