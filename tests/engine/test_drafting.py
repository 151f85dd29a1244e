"""What a drafter computes, against the draft model run from scratch. Losslessness hides every error made here.

The engine is handed scripted drafts, so that every accept length and roll-back occurs, while a real drafter at its side
is fed like any other and proposes; each of its proposals is recomputed without cache, from states of a plain pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from engine.harness import (
    CHAIN,
    DRAFTERS,
    SHAPES,
    TREE,
    Truth,
    decode,
    engine_for,
    plain_pass,
    plant,
    random_drafter,
    run,
    script,
    scripted,
    truth,
)
from scripted import ScriptedDrafter, plans
from torch import Tensor

from eyas.core import Draft, DraftShape, Request
from eyas.drafter import eagle3
from eyas.drafter.contract import TrueStates
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model
from eyas.engine import runner
from eyas.speculation.sampling import TokenHistory, needs_history, perturbed
from eyas.speculation.tree import TreeBuilder

IDS = (0, 1, 3)  # layers whose states a plain pass returns
SAMPLED = {"temperature": 1.3, "seed": 5, "top_k": 60, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


class Builder(TreeBuilder):
    """Keeps what it was given: at each level the paths to the frontier, and the scores of what may follow."""

    last: Builder

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.levels: list[tuple[list[list[int]], Tensor]] = []
        Builder.last = self

    def expand(self, scores: Tensor, token_ids: Tensor | None = None) -> Any:
        self.levels.append((self.paths().tolist(), scores.reshape(-1, scores.shape[-1])))
        return super().expand(scores, token_ids)


class Audited:
    """Proposes what ``stand_in`` does, and checks what ``drafter`` would have proposed."""

    def __init__(self, drafter: Eagle3Drafter, stand_in: ScriptedDrafter, references: dict[str, Reference]):
        self.drafter, self.stand_in, self.references = drafter, stand_in, references
        self.layer_ids = drafter.layer_ids
        self.checked = 0

    def start(self, *args: Any) -> None:
        self.drafter.start(*args)
        self.stand_in.start(*args)

    def clear(self, slot: int) -> None:
        self.drafter.clear(slot)
        self.stand_in.clear(slot)

    def extend(self, sequence: Any, true: TrueStates) -> None:
        self.drafter.extend(sequence, true)
        self.stand_in.extend(sequence, true)

    def propose(self, sequences: list[Any], shape: DraftShape) -> list[Draft]:
        for sequence in sequences:
            [draft] = self.drafter.propose([sequence], shape)
            self.check(sequence, shape, draft)
        return self.stand_in.propose(sequences, shape)

    def check(self, sequence: Any, shape: DraftShape, draft: Draft) -> None:
        """Every score at every depth, and the tree made of them."""
        reference, levels = self.references[sequence.request.id], Builder.last.levels
        rebuilt = TreeBuilder(shape, sequence.output_ids[-1])
        assert len(levels) == shape.num_steps
        for depth, (paths, scores) in enumerate(levels):
            assert all(len(path) == depth for path in paths)
            expected = torch.cat([reference.scores(sequence.request, sequence.output_ids, path) for path in paths])
            assert torch.equal(scores.isfinite(), expected.isfinite())
            torch.testing.assert_close(scores, expected, rtol=1e-4, atol=2e-3)
            rebuilt.expand(scores, reference.model.draft_to_target)
            self.checked += 1
        again = rebuilt.finish()
        assert draft.tokens.tolist() == again.tokens.tolist() and draft.parents == again.parents


class Reference:
    """The draft model on a whole sequence at once, every time anew."""

    def __init__(self, model: Eagle3Model, name: str, request: Request, answer: list[int]):
        everything = [*request.prompt_ids, *answer]
        states = plain_pass(name, everything, request.images).hidden_states
        self.model = model
        self.states = torch.cat([states[layer] for layer in IDS], dim=-1)
        embeds = zoo.case(name).model.get_input_embeddings().weight[torch.tensor([everything])]
        if request.images:  # the drafter sees an image as the target does
            seen = torch.tensor([everything]) == zoo.IMAGE
            embeds = torch.where(seen[..., None], states[0], embeds)
        self.embeds = embeds
        self.weight = zoo.case(name).model.get_input_embeddings().weight

    @torch.no_grad()
    def scores(self, request: Request, output: list[int], path: list[int]) -> Tensor:
        """[1, D]: log-probabilities, noise included, of what the target says after ``path``."""
        known = len(request.prompt_ids) + len(output) - 1  # places whose true state is known
        embeds = torch.cat([self.embeds[:, 1 : known + 1], self.weight[torch.tensor([path], dtype=torch.long)]], dim=1)
        hidden = self.model.fuse(self.states[:, :known])
        for length in range(known, known + len(path) + 1):
            out = self.model(embeds[:, :length], hidden, torch.arange(length)[None])
            hidden = torch.cat([hidden, out.next_hidden[:, -1:]], dim=1)
        sampling, history = request.sampling, None
        if needs_history(sampling):
            history = TokenHistory.from_tokens(request.prompt_ids, [*output, *path], len(self.weight))
        index = [len(output) + len(path)]
        columns = self.model.draft_to_target
        logits = self.model.logits(out.normed[:, -1])
        return perturbed(logits, sampling, index, token_ids=columns, history=history).log_softmax(-1)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle3, "TreeBuilder", Builder)


def audit(name: str, shape: DraftShape, kind: str = "standard", requests: list[Request] | None = None, **settings: Any):
    """Decodes under audit."""
    requests = requests or [truth(name).request(max_tokens=24)]
    drafter = random_drafter(name, kind, aux_layer_ids=IDS)
    scripts, references = {}, {}
    for request in requests:
        rest = decode(engine_for(name), request).tokens
        answer = [*request.output_ids, *rest]
        scripts[request.id] = replace(script(name, request.prompt_ids, request.images, answer), states=None)
        references[request.id] = Reference(drafter.model, name, request, answer)
    stand_in = ScriptedDrafter(scripts, plans(shape.num_steps)["in turn"], layer_ids=IDS)
    audited = Audited(drafter, stand_in, references)
    answers = run(engine_for(name, audited, shape, **settings), *requests)
    assert audited.checked >= 4 * shape.num_steps
    for request in requests:
        assert [*request.output_ids, *answers[request.id].tokens] == scripts[request.id].answer


@shapes
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_kind_of_drafter(kind, shape):
    audit("llama", shape, kind)


@shapes
@pytest.mark.parametrize("kind", ["standard", "reduced vocabulary"])
def test_sampled_with_penalties(kind, shape):
    """The noise, history and cuts of each place on each path."""
    audit("llama", shape, kind, [truth("llama").request(max_tokens=24, **SAMPLED)])


@pytest.mark.parametrize("name", ["gemma3", "deepseek-v3", "llama4"])
def test_targets(name):
    audit(name, TREE)


@pytest.mark.parametrize("name", [c.name for c in zoo.CASES if c.image])
def test_images(name):
    """Embeddings of image tokens are the target's; places count tokens, whatever the target's rotary positions."""
    seen = truth(name, image=True)
    audit(name, TREE, requests=[seen.request(max_tokens=20)])
    audit(name, CHAIN, requests=[replace(seen.request(max_tokens=20), output_ids=seen.tokens[:6])])


@pytest.mark.parametrize("size", [1, 7, 29, 30])
def test_prompts_in_pieces(size, monkeypatch):
    monkeypatch.setattr(runner, "PREFILL_CHUNK", size)
    audit("llama", TREE)


def test_several_at_once_and_again_in_used_slots():
    lengths = (30, 1, 9, 8, 30)
    prompts = [truth("llama", length=length, tokens=24) for length in lengths]
    sampled = [{}, SAMPLED, {}, SAMPLED, {"min_tokens": 5}]
    requests = [
        p.request(str(i), max_tokens=12 + i, **s) for i, (p, s) in enumerate(zip(prompts, sampled, strict=True))
    ]
    audit("llama", TREE, requests=requests, slots=2)


BUGS: dict[str, tuple[str, str, str]] = {
    "a place too far": ("_propose", "sequence.length - 1 + depth", "sequence.length + depth"),
    "all levels at one place": ("_propose", "sequence.length - 1 + depth", "sequence.length"),
    "states of the wrong parents": ("_propose", "hidden[frontier.rows][None]", "hidden[frontier.rows.flip(0)][None]"),
    "paths of the wrong parents": ("_propose", "tree[frontier.rows]", "tree[frontier.rows.flip(0)]"),
    "blind to its own path": ("_propose", "torch.eye(count", "0 * torch.eye(count"),
    "each level over the last": ("_propose", "sequence.length + tree.shape[1]", "sequence.length"),
    "states fed back normed": ("_propose", "out.next_hidden[0]", "out.normed[0]"),
    "noise of the same index": ("_scores", "sequence.output_index + depth", "sequence.output_index"),
    "history without the path": ("_scores", "history.extended(builder.paths())", "history"),
    "the state's own embedding": ("extend", "embed(true.tokens)", "embed(true.tokens.roll(1))"),
    "true places shifted": ("extend", "device=embeds.device)[None]", "device=embeds.device)[None] + 1"),
    "the oldest state as tip": ("extend", "out.next_hidden[0, -1:]", "out.next_hidden[0, :1]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_audit_sees(bug, monkeypatch):
    plant(monkeypatch, Eagle3Drafter, *BUGS[bug])
    with pytest.raises((AssertionError, RuntimeError)):
        audit("llama", TREE, requests=[truth("llama").request(max_tokens=24, **SAMPLED)])


def test_losslessness_does_not_see_them(monkeypatch):
    """Why this file exists."""
    plant(monkeypatch, Eagle3Drafter, *BUGS["a place too far"])
    expected: Truth = truth("llama")
    assert decode(engine_for("llama", random_drafter("llama"), TREE), expected.request()).tokens == expected.tokens
    assert decode(engine_for("llama", scripted(expected.script), TREE), expected.request()).tokens == expected.tokens
