"""What a drafter computes, against the draft model run from scratch. Losslessness hides every error made here.

The engine is handed scripted drafts, so that every accept length and roll-back occurs, while a real drafter at its side
is fed like any other and proposes; each of its proposals is recomputed without cache, from states of a plain pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from drafter.slow import Chooser, Slow, Watch
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
from scripted import ScriptedDrafter, Wrong, loudly, plans

from eyas.core import Draft, DraftShape, Request
from eyas.drafter import eagle3
from eyas.drafter.contract import Drafting, TrueStates
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model

IDS = (0, 1, 3)  # layers whose states a plain pass returns
SAMPLED = {"temperature": 1.3, "seed": 5, "top_k": 60, "repetition_penalty": 1.3, "frequency_penalty": 0.5}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


class Audited:
    """Proposes what ``stand_in`` does, and checks what ``drafter`` would have proposed."""

    def __init__(
        self, drafter: Eagle3Drafter, stand_in: ScriptedDrafter, references: dict[str, Slow], watch: Watch, vocab: int
    ):
        self.drafter, self.stand_in, self.references = drafter, stand_in, references
        self.watch, self.vocab = watch, vocab
        self.layer_ids = drafter.layer_ids
        self.checked = 0

    def start(self, *args: Any) -> None:
        self._both("start", *args)

    def layout(self, *args: Any) -> None:
        self._both("layout", *args)

    def copy(self, *args: Any) -> None:
        self._both("copy", *args)

    def clear(self, *args: Any) -> None:
        self._both("clear", *args)

    def extend(self, true: TrueStates) -> None:
        self._both("extend", true)

    @loudly
    def propose(self, drafting: Drafting, shape: DraftShape) -> Draft:
        draft = self.stand_in.propose(drafting, shape)
        self.watch.propose(self.drafter, drafting, shape)
        for row, sequence in enumerate(drafting.sequences):
            if sequence is not None:
                request = sequence.request
                chooser = Chooser(request.sampling, request.prompt_ids, sequence.output_ids, self.vocab)
                self.references[request.id].check(sequence.length, chooser, self.watch.levels(row))
                self.checked += 1
        return draft

    @loudly
    def _both(self, name: str, *args: Any) -> None:
        for drafter in (self.drafter, self.stand_in):
            getattr(drafter, name)(*args)


def reference(model: Eagle3Model, name: str, request: Request, answer: list[int]) -> Slow:
    """The draft model on what a plain pass says of prompt and answer."""
    everything = torch.tensor([*request.prompt_ids, *answer])
    states = plain_pass(name, everything.tolist(), request.images).hidden_states
    embeds = zoo.case(name).model.get_input_embeddings().weight[everything]
    if request.images:  # the drafter sees an image as the target does
        embeds = torch.where((everything == zoo.IMAGE)[:, None], states[0][0], embeds)
    return Slow(model, torch.cat([states[layer][0] for layer in IDS], dim=-1), embeds[1:])


Audit = Callable[..., None]


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> Audit:
    return partial(_audit, Watch(monkeypatch))


def _audit(
    watch: Watch,
    name: str,
    shape: DraftShape,
    kind: str = "standard",
    requests: list[Request] | None = None,
    **settings: Any,
) -> None:
    """Decodes under audit."""
    requests = requests or [truth(name).request(max_tokens=24)]
    drafter = random_drafter(name, kind, aux_layer_ids=IDS)
    scripts, references = {}, {}
    for request in requests:
        rest = decode(engine_for(name), request).tokens
        answer = [*request.output_ids, *rest]
        slow = references[request.id] = reference(drafter.model, name, request, answer)
        scripts[request.id] = replace(script(name, request.prompt_ids, request.images, answer), states=slow.states)
    stand_in = ScriptedDrafter(scripts, plans(shape.num_steps)["in turn"], layer_ids=IDS)
    vocab = len(zoo.case(name).model.get_input_embeddings().weight)
    audited = Audited(drafter, stand_in, references, watch, vocab)
    answers = run(engine_for(name, audited, shape, **settings), *requests)
    assert audited.checked >= 4 * len(requests)
    for request in requests:
        assert [*request.output_ids, *answers[request.id].tokens] == scripts[request.id].answer


@shapes
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_kind_of_drafter(audit, kind, shape):
    audit("llama", shape, kind)


@shapes
@pytest.mark.parametrize("kind", ["standard", "reduced vocabulary"])
def test_sampled_with_penalties(audit, kind, shape):
    """The noise, history and cuts of each place on each path."""
    audit("llama", shape, kind, [truth("llama").request(max_tokens=24, **SAMPLED)])


@pytest.mark.parametrize("name", ["gemma3", "deepseek-v3", "llama4"])
def test_targets(audit, name):
    audit(name, TREE)


@pytest.mark.parametrize("name", [c.name for c in zoo.CASES if c.image])
def test_images(audit, name):
    """Embeddings of image tokens are the target's; places count tokens, whatever the target's rotary positions."""
    seen = truth(name, image=True)
    audit(name, TREE, requests=[seen.request(max_tokens=20)])
    audit(name, CHAIN, requests=[replace(seen.request(max_tokens=20), output_ids=seen.tokens[:6])])


@pytest.mark.parametrize("size", [1, 7, 29, 30])
def test_prompts_in_pieces(audit, size):
    audit("llama", TREE, chunked_prefill_size=size)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_several_at_once_and_again_in_used_slots(audit, shape):
    lengths = (30, 1, 9, 8, 30)
    prompts = [truth("llama", length=length, tokens=24) for length in lengths]
    sampled = [{}, SAMPLED, {}, SAMPLED, {"min_tokens": 5}]
    requests = [
        p.request(str(i), max_tokens=12 + i, **s) for i, (p, s) in enumerate(zip(prompts, sampled, strict=True))
    ]
    audit("llama", shape, requests=requests, max_running_requests=2)


BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a place too far": (Eagle3Drafter, "_tree", "lengths - 1 + depth", "lengths + depth"),
    "all levels at one place": (Eagle3Drafter, "_tree", "lengths - 1 + depth", "lengths"),
    "states of the wrong parents": (
        Eagle3Drafter,
        "_tree",
        "(hidden, frontier.rows)",
        "(hidden, frontier.rows.flip(1))",
    ),
    "paths of the wrong parents": (Eagle3Drafter, "_tree", "seen, frontier.rows", "seen, frontier.rows.flip(1)"),
    "blind to its own path": (Eagle3Drafter, "_tree", "scatter(2, rows[..., None], True)", "clone()"),
    "each level over the last": (Eagle3Drafter, "_tree", "(depth - 1) * count", "0 * count"),
    "states and what the head reads": (Eagle3Drafter, "_tree", "hidden, normed = model", "normed, hidden = model"),
    "noise of the same index": (Eagle3Drafter, "_expanded", "rows, depth, token_ids", "rows, 0, token_ids"),
    "history without the path": (Eagle3Drafter, "_expanded", "paths=paths", "paths=None"),
    "the state's own embedding": (Eagle3Drafter, "extend", "embed(true.tokens)", "embed(true.tokens.roll(1, 1))"),
    "true places shifted": (eagle3, "follow", "rotations(places)", "rotations(places + 1)"),
    "the oldest state as tip": (eagle3, "follow", "(counts - 1).clamp(min=0)", "(0 * counts)"),
}
CHAIN_BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a place too far": (eagle3, "chain_tokens", "rotations(rows)", "rotations(rows + 1)"),
    "all steps at one place": (
        eagle3,
        "chain_tokens",
        "rotations(rows)",
        "rotations(lengths[:, None].expand_as(rows))",
    ),
    "blind to itself": (eagle3, "chain_tokens", "<= rows", "< rows"),
    "each step over the last": (eagle3, "chain_tokens", "rows[:, step - 1]", "rows[:, 0]"),
    "states and what the head reads": (eagle3, "chain_tokens", "hidden, normed = model", "normed, hidden = model"),
    "the first token again": (eagle3, "chain_tokens", "embed(path[-1])", "embed(path[0])"),
    "noise of the same index": (Eagle3Drafter, "_choice", "rows, len(path), token", "rows, 0, token"),
    "history without the path": (Eagle3Drafter, "_choice", "if path and", "if not path and"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_audit_sees(audit, bug, monkeypatch):
    plant(monkeypatch, *BUGS[bug])
    with pytest.raises(Wrong):
        audit("llama", TREE, requests=[truth("llama").request(max_tokens=24, **SAMPLED)])


@pytest.mark.parametrize("bug", CHAIN_BUGS)
def test_the_audit_sees_in_chains(audit, bug, monkeypatch):
    plant(monkeypatch, *CHAIN_BUGS[bug])
    with pytest.raises(Wrong):
        audit("llama", CHAIN, requests=[truth("llama").request(max_tokens=24, **SAMPLED)])


def test_losslessness_does_not_see_them(monkeypatch):
    """Why this file exists."""
    plant(monkeypatch, *BUGS["a place too far"])
    expected: Truth = truth("llama")
    assert decode(engine_for("llama", random_drafter("llama"), TREE), expected.request()).tokens == expected.tokens
    assert decode(engine_for("llama", scripted(expected.script), TREE), expected.request()).tokens == expected.tokens
