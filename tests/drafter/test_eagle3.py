"""The drafter at run time, fed by hand: a batch drafts what the draft model, run from scratch, says of each."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from drafter.slow import Chooser, Slow, Watch
from torch import Tensor

from eyas.core import Draft, DraftShape, Request, SamplingParams
from eyas.drafter.contract import Drafting, TrueStates, drafted_rows
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model, untrained
from eyas.speculation.sampling import rows_of

VOCAB, HIDDEN, LAYERS = 60, 32, 3
SHAPES = {
    "chain": DraftShape(5, 1, 6),
    "chain of one": DraftShape(1, 1, 2),
    "tree": DraftShape(4, 3, 12),
    "bush": DraftShape(3, 4, 24),
    "leaves": DraftShape(1, 4, 5),
}
KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "reduced vocabulary": {"draft_vocab_size": 25},
    "two layers, all norms": {
        "num_hidden_layers": 2,
        "norm_output": True,
        "fc_norm": True,
        "norm_before_residual": True,
        "qk_norm": True,
    },
    "few tokens": {"draft_vocab_size": 2},  # fewer than top-k
}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "seed": 5, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.7, "seed": 6},
    {"logit_bias": {3: 4.0, 7: -9.0}},
    {"presence_penalty": 1.5},
    {"min_tokens": 12},
]
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


class Target:
    """All that a drafter asks of one."""

    def __init__(self, context_length: int | None = None):
        generator = torch.Generator().manual_seed(0)
        self.embed, self.head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
        self.context_length = context_length

    def get_embed_and_head(self) -> tuple[Tensor, Tensor]:
        return self.embed, self.head


@dataclass
class Running:
    """A sequence with made-up states: ``length`` places are known, and ``output`` ends with the token behind them."""

    length: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    stop_ids: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.states = torch.randn(self.length, LAYERS * HIDDEN, generator=generator)
        tokens = torch.randint(VOCAB, (self.length + 1,), generator=generator).tolist()
        split = max(1, self.length - 3)
        self.prompt, self.output_ids, self.after = tokens[:split], tokens[split:], torch.tensor(tokens[1:])
        self.request = Request(str(self.seed), self.prompt, self.sampling)

    @property
    def chooser(self) -> Chooser:
        return Chooser(self.sampling, self.prompt, self.output_ids, VOCAB, self.stop_ids)

    def earlier(self) -> Running:
        """The same before its last token."""
        before = copy(self)
        before.length, before.output_ids = self.length - 1, self.output_ids[:-1]
        return before

    def slow(self, model: Eagle3Model) -> Slow:
        return Slow(model, self.states, model.embed(self.after))


Batch = Sequence[Running | None]


def mixed() -> list[Running | None]:
    """Different lengths and settings, and holes."""
    lengths = [9, 1, None, 17, 4, 12, 6, None]
    settings = iter(SAMPLINGS)
    return [n and Running(n, SamplingParams(**next(settings)), seed) for seed, n in enumerate(lengths)]


def model_of(kind: str = "standard", **overrides: Any) -> Eagle3Model:
    """Weights at which everything makes a difference to what is drafted."""
    model = untrained(HIDDEN, 8, VOCAB, **{**KINDS[kind], **overrides})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.dim() == 1 else 1.5 * noise * weight.shape[-1] ** -0.5)
        size = model.config.draft_vocab_size
        model.draft_to_target.copy_(torch.randperm(VOCAB, generator=generator)[:size].sort().values)
    return model


def started(model: Eagle3Model, slots: int = 8, length: int = 64, target: Target | None = None) -> Eagle3Drafter:
    drafter = Eagle3Drafter(model)
    drafter.start(target or Target(), slots * length)
    drafter.layout(slots, length)
    return drafter


Ints = Sequence[int]


def feed(drafter: Eagle3Drafter, batch: Batch, slot: int = 0, to: Ints | None = None, of: Ints | None = None) -> None:
    """Extends slots from ``slot`` on: sequence b by its places of[b] to to[b]; by default all of them at once."""
    to = [s.length if s else 0 for s in batch] if to is None else to
    of = [0] * len(batch) if of is None else of
    counts = [end - begin for begin, end in zip(of, to, strict=True)]
    count = max(1, *counts) + 2
    states = torch.full((len(batch), count, LAYERS * HIDDEN), float("nan"))  # padding may be anything
    tokens = torch.full((len(batch), count), 5)
    for row, (s, begin, end) in enumerate(zip(batch, of, to, strict=True)):
        if s:
            states[row, : end - begin], tokens[row, : end - begin] = s.states[begin:end], s.after[begin:end]
    starts = torch.tensor(of)
    drafter.extend(TrueStates(slot, starts, torch.tensor(counts), states, tokens, max(of) + count))


def drafting(batch: Batch, shape: DraftShape) -> Drafting:
    lengths = [s.length if s else 0 for s in batch]
    roots = [s.output_ids[-1] if s else 0 for s in batch]
    rows = rows_of([s.chooser if s else None for s in batch])
    length = max(lengths) + drafted_rows(shape) + 3
    return Drafting(batch, torch.tensor(lengths), torch.tensor(roots), rows, length)


def propose(drafter: Eagle3Drafter, batch: Batch, shape: DraftShape) -> Draft:
    return drafter.propose(drafting(batch, shape), shape)


def rows_of_draft(draft: Draft) -> list[tuple[list[int], list[int] | None]]:
    parents = [None] * len(draft.tokens) if draft.parents is None else draft.parents.tolist()
    return list(zip(draft.tokens.tolist(), parents, strict=True))


def assert_same(draft: Draft, expected: Draft, batch: Batch) -> None:
    pairs = zip(batch, rows_of_draft(draft), rows_of_draft(expected), strict=True)
    assert all(mine == theirs for s, mine, theirs in pairs if s)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@shapes
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_drafts_what_the_model_says(kind: str, shape: DraftShape, watch: Watch) -> None:
    model, batch = model_of(kind), mixed()
    drafter = started(model)
    feed(drafter, batch)
    draft = watch.propose(drafter, drafting(batch, shape), shape)
    assert len(draft.tokens) == len(batch)
    assert draft.tokens.shape[1] == shape.num_draft_tokens or kind == "few tokens"
    assert (draft.parents is None) == (shape.eagle_topk == 1)
    for row, s in enumerate(batch):
        if s:
            assert draft.tokens[row, 0] == s.output_ids[-1]
            s.slow(model).check(s.length, s.chooser, watch.levels(row))


@shapes
def test_a_batch_of_greedy_sequences(shape: DraftShape, watch: Watch) -> None:
    """Chains take a shorter way then."""
    model = model_of()
    batch: Batch = [Running(length, seed=length) for length in (5, 30, 1, 11)]
    drafter = started(model)
    feed(drafter, batch)
    draft = watch.propose(drafter, drafting(batch, shape), shape)
    assert len({tuple(row) for row in draft.tokens.tolist()}) == len(batch)
    for row, s in enumerate(batch):
        s.slow(model).check(s.length, s.chooser, watch.levels(row))


@shapes
def test_a_batch_drafts_as_each_sequence_alone(shape: DraftShape) -> None:
    model, batch = model_of(), mixed()
    together, alone = started(model), started(model, slots=1)
    feed(together, batch)
    rows = rows_of_draft(propose(together, batch, shape))
    for row, s in enumerate(batch):
        if s:
            alone.clear(0)
            feed(alone, [s])
            assert rows_of_draft(propose(alone, [s], shape)) == [rows[row]]


@shapes
def test_drafts_leave_no_trace(shape: DraftShape) -> None:
    """Neither in another draft, nor in true rows, nor behind what is drafted after the next true states."""
    model = model_of()
    batch = [s and (s if s.length > 1 else None) for s in mixed()]
    earlier = [s and s.earlier() for s in batch]
    places = [s.length if s else 0 for s in earlier]
    drafter, other = started(model), started(model)
    feed(drafter, earlier)
    true = [[part[b, :, :n].clone() for b, n in enumerate(places)] for part in drafter.cache.views(0, 8, 64)[0]]
    first = propose(drafter, earlier, shape)
    assert_same(propose(drafter, earlier, shape), first, batch)
    for part, was in zip(drafter.cache.views(0, 8, 64)[0], true, strict=True):
        assert all(torch.equal(part[b, :, :n], was[b]) for b, n in enumerate(places))
    feed(drafter, batch, of=places)
    feed(other, batch)
    assert_same(propose(drafter, batch, shape), propose(other, batch, shape), batch)


@shapes
def test_pieces_are_the_whole(shape: DraftShape) -> None:
    """Some sequences have nothing in a piece; some slots are extended by themselves."""
    model, batch = model_of(), mixed()
    whole, pieces = started(model), started(model)
    feed(whole, batch)
    ends = [s.length if s else 0 for s in batch]
    done = [0] * len(batch)
    for step in (2, 1, 5):
        places = enumerate(zip(done, ends, strict=True))
        to = [min(end, n + step) if (row + step) % 3 else n for row, (n, end) in places]
        feed(pieces, batch, of=done, to=to)
        done = to
    for slot, (s, n, end) in enumerate(zip(batch, done, ends, strict=True)):
        if n < end:
            feed(pieces, [s], slot, of=[n], to=[end])
    assert_same(propose(pieces, batch, shape), propose(whole, batch, shape), batch)


def test_nothing_new_changes_nothing() -> None:
    batch: Batch = [Running(7, seed=1), Running(3, seed=2)]
    drafter = started(model_of(), slots=2)
    feed(drafter, batch)
    before = [tip.clone() for tip in drafter._tips], drafter.cache.views(0, 2, 64)[0][0].clone()
    feed(drafter, batch, of=[7, 3], to=[7, 3])
    assert all(torch.equal(new, old) for new, old in zip(drafter._tips, before[0], strict=True))
    keys = drafter.cache.views(0, 2, 64)[0][0]
    assert torch.equal(keys[0, :, :7], before[1][0, :, :7]) and torch.equal(keys[1, :, :3], before[1][1, :, :3])


@shapes
@pytest.mark.parametrize("layout", [(8, 40), (16, 32), (1, 400)], ids=str)
def test_another_layout_changes_nothing(layout: tuple[int, int], shape: DraftShape) -> None:
    model = model_of()
    batch = mixed()[: layout[0]]
    drafter, still = started(model), started(model)
    feed(drafter, batch)
    feed(still, batch)
    drafter.layout(*layout)
    assert_same(propose(drafter, batch, shape), propose(still, batch, shape), batch)


@shapes
def test_a_copied_prefix(shape: DraftShape) -> None:
    """Slot 3 takes over what slot 0 knows, moves on from there, and leaves slot 0 alone."""
    model, s = model_of(), Running(14, seed=3)
    drafter = started(model)
    feed(drafter, [s])
    drafter.copy(0, 3, 9)
    feed(drafter, [s], slot=3, of=[9], to=[14])
    expected = rows_of_draft(propose(drafter, [s], shape))[0]
    four: Batch = [s, None, None, s]
    assert [rows_of_draft(propose(drafter, four, shape))[row] for row in (0, 3)] == [expected, expected]


@shapes
def test_places_beyond_what_was_reserved(shape: DraftShape) -> None:
    model, s = model_of(max_position_embeddings=4), Running(40, seed=4)
    drafter = started(model, slots=1, target=Target(context_length=16))
    assert len(model.rotations(torch.arange(32))) == 32, "twice the context"
    with pytest.raises(IndexError):
        model.rotations(torch.tensor([32]))
    feed(drafter, [s])
    expected = started(model_of(), slots=1)
    feed(expected, [s])
    assert_same(propose(drafter, [s], shape), propose(expected, [s], shape), [s])


@shapes
def test_a_broken_sequence_breaks_no_other(shape: DraftShape) -> None:
    model, good, new = model_of(), Running(6, seed=1), Running(3, seed=2)
    broken = Running(8, seed=3)
    broken.states[2:] = float("nan")
    drafter, clean = started(model, slots=3), started(model, slots=3)
    feed(drafter, [good, broken, broken])
    feed(clean, [good, new, new])
    propose(drafter, [good, broken, None], shape)
    with torch.inference_mode():
        propose(drafter, [good, broken, broken], shape)
        drafter.layout(2, 64)
        drafter.layout(3, 64)
    drafter.clear(1, 2)
    propose(drafter, [good, None, None], shape)
    batch: Batch = [good, new, new]
    feed(drafter, [new, new], slot=1)
    assert_same(propose(drafter, batch, shape), propose(clean, batch, shape), batch)


@pytest.mark.parametrize("width", [HIDDEN, 2 * HIDDEN])
def test_images_are_seen_as_the_target_sees_them(width: int, watch: Watch) -> None:
    """Where its embeddings are of the drafter's width; in another, there is nothing to see but the token."""
    model, s = model_of(), Running(9, seed=5)
    image_mask = torch.zeros(1, 9, dtype=torch.bool)
    image_mask[0, 2:6] = True
    given = torch.randn(1, 9, width, generator=torch.Generator().manual_seed(7))
    drafter = started(model, slots=1)
    whole = torch.tensor([0]), torch.tensor([9]), s.states[None], s.after[None]
    drafter.extend(TrueStates(0, *whole, 9, image_mask, given))
    slow = s.slow(model)
    if width == HIDDEN:
        slow.embeds = torch.where(image_mask[0, :, None], given[0], slow.embeds)
    watch.propose(drafter, drafting([s], SHAPES["chain"]), SHAPES["chain"])
    slow.check(9, s.chooser, watch.levels(0))


@shapes
@pytest.mark.parametrize("batch", [mixed(), [Running(7), Running(3)]], ids=["mixed", "greedy"])
def test_nothing_waits_for_the_device(batch: Batch, shape: DraftShape) -> None:
    """On the meta device no tensor has values: whoever looks at one raises."""
    model = model_of().to("meta")
    with torch.device("meta"):
        drafter = started(model)
        feed(drafter, batch)
        draft = propose(drafter, batch, shape)
    assert draft.tokens.device.type == "meta" and draft.tokens.shape == (len(batch), shape.num_draft_tokens)


def test_the_head_sees_one_state_of_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the widest product of all, and a prompt has thousands of states."""
    sizes: list[torch.Size] = []
    logits = Eagle3Model.logits

    def counted(model: Eagle3Model, normed: Tensor) -> Tensor:
        sizes.append(normed.shape[:2])
        return logits(model, normed)

    monkeypatch.setattr(Eagle3Model, "logits", counted)
    batch = mixed()
    drafter = started(model_of())
    feed(drafter, batch)
    propose(drafter, batch, SHAPES["chain"])
    assert sizes == 5 * [(8, 1)]
