from __future__ import annotations

import numpy as np
import pytest
import torch

from eyas.training.batches import epoch_batches, pack
from eyas.training.dataset import Row


def rows_of(*masks: str) -> list[Row]:
    return [
        Row(np.arange(len(m), dtype=np.int32) + 100 * n, np.array([c == "x" for c in m])) for n, m in enumerate(masks)
    ]


@pytest.mark.parametrize("tokens", [1, 64, 512, 100_000])
def test_every_row_once_an_epoch(tokens: int) -> None:
    lengths = np.random.default_rng(0).integers(2, 200, 500)
    batches = epoch_batches(lengths, tokens, seed=3, epoch=0)
    assert sorted(row for batch in batches for row in batch) == list(range(500))
    for batch in batches:
        assert list(lengths[list(batch)]) == sorted(lengths[list(batch)], reverse=True), "longest first"


def test_batches_are_even_and_full() -> None:
    lengths = np.random.default_rng(1).integers(40, 400, 4000)
    batches = [
        pack([Row(np.zeros(n, np.int32), np.ones(n, bool)) for n in lengths[list(b)]], b)
        for b in epoch_batches(lengths, 768, seed=0, epoch=0)
    ]
    padded = np.array([b.tokens.numel() for b in batches])
    assert sum(b.count for b in batches) == lengths.sum()
    assert lengths.sum() / padded.sum() > 0.95, "little padding"
    assert np.quantile(padded, 0.05) > 0.6 * 768 and np.quantile(padded, 0.95) < 1.4 * 768
    assert abs(padded.mean() / 768 - 1) < 0.15


def test_order_follows_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(0).integers(2, 200, 300)
    first = epoch_batches(lengths, 256, seed=3, epoch=1)
    assert first == epoch_batches(lengths.tolist(), 256, seed=3, epoch=1)
    others = [epoch_batches(lengths, 256, seed=3, epoch=2), epoch_batches(lengths, 256, seed=4, epoch=1)]
    assert all(sorted(map(sorted, first)) != sorted(map(sorted, other)) for other in others)
    assert epoch_batches([], 256, seed=0, epoch=0) == []


def test_rows_lie_whole_in_lines() -> None:
    rows = rows_of("...xxxx", "..xx", ".xx", "x", "xx")
    batch = pack(rows, [10, 11, 12, 13, 14])
    assert batch.tokens.shape == (3, 7) and batch.count == 17
    assert batch.rows == [10, 11, 12, 13, 14]
    for number, row in zip(batch.rows, rows, strict=True):
        at = batch.owners == number
        assert batch.tokens[at].tolist() == row.ids.tolist(), "in order, one line"
        assert batch.places[at].tolist() == list(range(len(row.ids)))
        assert len(set(at.nonzero()[:, 0].tolist())) == 1


def test_written_tokens_ahead_stop_at_gaps_and_ends() -> None:
    row = rows_of("..xxx.xx.x")[0]
    assert pack([row], [0]).ahead.tolist() == [[0, 3, 2, 1, 0, 2, 1, 0, 1, 0]]
    two = pack(rows_of("....xx", ".xx", "xxx"), [0, 1, 2])
    assert two.ahead.tolist() == [[0, 0, 0, 2, 1, 0], [2, 1, 0, 2, 1, 0]], "not into the next row"


def test_a_token_sees_its_row_up_to_itself() -> None:
    batch = pack(rows_of("xxxx", "xx", "x"), [0, 1, 2])
    seen = batch.seen()
    same = torch.tensor([[0, 0, 0, 0], [1, 1, 2, -1]])
    for line in range(2):
        for query in range(4):
            for key in range(4):
                expected = bool(same[line, query] == same[line, key]) and key <= query
                assert bool(seen[line, query, key]) == expected
