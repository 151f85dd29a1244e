"""The constraint's place among the sampling settings: a mask on the logits, for those rows that have one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from speculation.toys import PROMPT, SETTINGS, STOP_IDS, Toy, sampling, toy
from torch import Tensor

from eyas.core import DraftShape, SamplingParams, StructuredOutputsParams
from eyas.speculation.sampling import choose, draft_scores, process_logits, rows_of
from eyas.speculation.tree import TreeBuilder, chain

VOCAB, NODES = 70, 5  # three words, the last of them in part
EVERY = pytest.mark.parametrize("setting", ["greedy", *SETTINGS])


def params(setting: str, seed: int = 0) -> SamplingParams:
    if setting == "greedy":
        return SamplingParams(seed=seed)
    found = sampling(setting, seed)
    return replace(found, top_k=20) if found.top_k else found


def constrained(plain: SamplingParams) -> SamplingParams:
    return replace(plain, structured_outputs=StructuredOutputsParams(json_object=True))


def masks(seed: int, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, what is allowed as bool, and the same packed, by Python's own integers."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*shape, VOCAB, generator=generator)
    allowed = torch.rand(*shape, VOCAB, generator=generator) < 0.3
    allowed[..., 31] = allowed[..., 63] = True  # sign bits of their words
    words = []
    for row in allowed.flatten(0, -2).tolist():
        number = sum(1 << v for v, fine in enumerate(row) if fine)
        whole = number.to_bytes(12, "little")
        words.append([int.from_bytes(whole[at : at + 4], "little", signed=True) for at in (0, 4, 8)])
    packed = torch.tensor(words, dtype=torch.int32)
    return logits, allowed, packed.view(*shape, 3)


@EVERY
def test_it_is_as_if_the_target_could_say_nothing_else(setting):
    logits, allowed, bits = masks(1, 1, NODES)
    draft = chain(torch.tensor([[PROMPT[-1], 4, 31, 31, 7]]))
    plain = params(setting)
    found = choose(logits, rows_of([toy(constrained(plain), [5, 5], VOCAB)]), draft, bits)
    expected = choose(logits.masked_fill(~allowed, -math.inf), rows_of([toy(plain, [5, 5], VOCAB)]), draft)
    assert torch.equal(found.tokens, expected.tokens) and found.finite.all()
    assert allowed[0].gather(1, found.tokens[0, :, None]).all()
    free = choose(logits, rows_of([toy(plain, [5, 5], VOCAB)]), draft)
    assert not torch.equal(found.tokens, free.tokens), "the mask makes no difference here"


def test_a_mixed_batch_chooses_as_each_sequence_alone():
    """Bits are those of constrained sequences only, in the order of their rows."""
    settings = ["greedy", "plain", "repetition", "min_tokens", "greedy", "plain", "all", "greedy"]
    sequences = [
        toy((constrained if row % 3 else lambda p: p)(params(setting, row)), [5] * row, VOCAB)
        for row, setting in enumerate(settings)
    ]
    sequences[5] = None
    logits, _, bits = masks(2, len(settings), NODES)
    draft = chain(torch.randint(VOCAB, (len(settings), NODES), generator=torch.Generator().manual_seed(3)))
    places = [row for row, s in enumerate(sequences) if s is not None and row % 3]
    together = choose(logits, rows_of(sequences), draft, bits[places])
    scores = draft_scores(logits, rows_of(sequences), 0, allowed=bits[places])
    for row, sequence in enumerate(sequences):
        if sequence is None:
            continue
        here, own = slice(row, row + 1), bits[row : row + 1] if row in places else None
        alone = choose(logits[here], rows_of([sequence]), chain(draft.tokens[here]), own)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(draft_scores(logits[here], rows_of([sequence]), 0, allowed=own)[0], scores[row])


@EVERY
def test_a_drafter_proposes_what_is_allowed(setting):
    """In a vocabulary of its own, in another order."""
    ids = torch.arange(VOCAB - 1, -1, -3)
    logits, allowed, bits = masks(4, 1, 2)
    sequence = toy(constrained(params(setting)), [5], VOCAB)
    scores = draft_scores(
        logits[..., : len(ids)], rows_of([sequence]), 0, token_ids=ids, paths=torch.zeros(1, 2, 0).long(), allowed=bits
    )
    assert not (scores.isfinite() & ~allowed[..., ids]).any()
    assert scores.isfinite().any(-1).all()


def test_where_nothing_is_allowed_a_tree_ends():
    _, _, bits = masks(5, 1, 1)
    rows = rows_of([toy(constrained(params("plain")), [], VOCAB)])
    builder = TreeBuilder(DraftShape(3, 2, 6), torch.tensor([PROMPT[-1]]))
    logits = torch.zeros(1, 1, VOCAB)
    builder.expand(draft_scores(logits, rows, 0, paths=builder.paths(), allowed=bits))
    nothing = torch.zeros(1, 2, 3, dtype=torch.int32)
    for depth in (1, 2):
        builder.expand(draft_scores(logits.expand(1, 2, -1), rows, depth, paths=builder.paths(), allowed=nothing))
    draft = builder.finish()
    assert draft.depths is not None and draft.depths.tolist() == [[0, 1, 1, 0, 0, 0]]


def test_min_tokens_do_not_count_where_the_answer_is_complete():
    stop = STOP_IDS[0]
    allowed = torch.zeros(2, VOCAB, dtype=torch.bool)
    allowed[:, stop] = allowed[1, 9] = True
    plain = SamplingParams(min_tokens=5, max_tokens=8)
    done = process_logits(torch.zeros(2, VOCAB), plain, output_indices=[1, 1], stop_ids=STOP_IDS, allowed=allowed)
    assert done.isfinite().nonzero().tolist() == [[0, stop], [1, 9]]


def test_bits_must_be_given():
    sequence = Toy(constrained(SamplingParams()))
    with pytest.raises(ValueError, match="constrained sequences"):
        choose(torch.zeros(1, 1, VOCAB), rows_of([sequence]), chain(torch.zeros(1, 1, dtype=torch.int64)))
