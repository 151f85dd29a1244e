"""Masks against the definition, one (query, key) pair at a time."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eyas.core import TargetError
from eyas.target.contract import Block
from eyas.target.masks import MaskKinds, visible

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
SIZE = 4  # of windows and chunks


def tree_block(starts: list[int], parents: list[list[int]], beyond: int = 0) -> Block:
    """``beyond``: how many more rows to look at than the longest sequence needs."""
    count = len(parents[0])
    depths, ancestors = [], []
    for row in parents:
        paths = [[i] for i in range(count)]
        for i, parent in enumerate(row):
            while parent >= 0:
                paths[i].append(parent)
                parent = row[parent]
        depths.append([len(path) - 1 for path in paths])
        ancestors.append([[j in path for j in range(count)] for path in paths])
    line = line_block(starts, count, beyond)
    return replace(line, depths=torch.tensor(depths), ancestors=torch.tensor(ancestors))


def line_block(starts: list[int], count: int, beyond: int = 0) -> Block:
    tokens = torch.zeros(len(starts), count, dtype=torch.long)
    return Block(tokens, 3, torch.tensor(starts), max(starts) + count + beyond)


def random_parents(count: int, rng: random.Random) -> list[int]:
    return [-1, *(rng.randrange(max(0, i - 3), i) for i in range(1, count))]


def sees(kind: str, block: Block, row: int, query: int, column: int) -> bool:
    """Whether token ``query`` of the block attends to row ``column`` of the cache, by the definition of each kind."""
    start = int(block.starts[row])
    place = start + (query if block.depths is None else int(block.depths[row, query]))
    if column < start:
        key_place = column
    else:
        node = column - start
        if node >= block.tokens.shape[1]:
            return False
        key_place = start + (node if block.depths is None else int(block.depths[row, node]))
        if not (node <= query if block.ancestors is None else bool(block.ancestors[row, query, node])):
            return False
    if kind == SLIDING:
        return place - key_place < SIZE
    if kind == CHUNKED:
        return place // SIZE == key_place // SIZE
    return True


def naive(kind: str, block: Block) -> torch.Tensor:
    rows, count = block.tokens.shape
    return torch.tensor(
        [[[sees(kind, block, b, q, k) for k in range(block.length)] for q in range(count)] for b in range(rows)]
    )


RNG = random.Random(0)
BLOCKS = {
    "first-token": line_block([0], 1),
    "prompt": line_block([0], 11),
    "one-token": line_block([9], 1),
    "piece-over-borders": line_block([6], 7),
    "ragged-pieces": line_block([0, 13, 4], 5),
    "tree-at-nothing": tree_block([0], [random_parents(6, RNG)]),
    "tree-at-border": tree_block([8], [[-1, 0, 0, 1, 2, 2, 4]]),
    "deep-tree": tree_block([5], [random_parents(12, RNG)]),
    "ragged-trees": tree_block([7, 0, 12], [random_parents(9, RNG) for _ in range(3)]),
    "padded-trees": tree_block([3, 10], [[-1, 0, 1, 2], [-1, 0, -1, -1]]),  # padding nodes see themselves alone
    "first-token-in-a-long-view": line_block([0], 1, beyond=9),
    "ragged-pieces-in-a-long-view": line_block([0, 13, 4], 5, beyond=6),
    "ragged-trees-in-a-long-view": tree_block([7, 0, 12], [random_parents(9, RNG) for _ in range(3)], beyond=13),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kind", [FULL, SLIDING, CHUNKED])
def test_masks_are_the_definition(kind, name):
    block = BLOCKS[name]
    expected = naive(kind, block)[:, None]
    mask = MaskKinds((kind,), SIZE, SIZE, additive=False).build(block, torch.float32)
    assert mask.shape[-1] == block.length
    assert mask.dtype == torch.bool
    assert torch.equal(mask, expected)
    assert mask.any(-1).all(), "a query that sees nothing makes NaN"
    for dtype in (torch.float32, torch.bfloat16):
        additive = MaskKinds((kind,), SIZE, SIZE, additive=True).build(block, dtype)
        assert additive.dtype == dtype
        assert torch.equal(additive == 0, expected)
        assert (additive[~expected] == torch.finfo(dtype).min).all(), "finite: -inf - -inf is NaN"


def test_mixed_kinds_come_as_a_dict():
    block = BLOCKS["ragged-trees"]
    masks = MaskKinds((FULL, SLIDING), SIZE, 0, additive=False).build(block, torch.float32)
    assert sorted(masks) == [FULL, SLIDING]
    for kind, mask in masks.items():
        assert torch.equal(mask, naive(kind, block)[:, None])


@pytest.mark.parametrize("name", BLOCKS)
def test_places_of_queries_and_keys(name):
    """A token's place is its start plus its depth; its row in the cache is its start plus its index."""
    block = BLOCKS[name]
    _, query, key = visible(block)
    for row, start in enumerate(block.starts.tolist()):
        depths = list(range(block.tokens.shape[1])) if block.depths is None else block.depths[row].tolist()
        assert query[row].tolist() == [start + depth for depth in depths]
        assert key[row, : start + len(depths)].tolist() == [*range(start), *(start + depth for depth in depths)]


def config(**settings: object) -> SimpleNamespace:
    return SimpleNamespace(_attn_implementation="sdpa", **settings)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, (FULL,)),
        ({"sliding_window": None, "attention_chunk_size": None}, (FULL,)),
        ({"sliding_window": 5}, (SLIDING,)),
        ({"attention_chunk_size": 5}, (CHUNKED,)),
        ({"layer_types": [FULL, FULL], "sliding_window": 5}, (FULL,)),
        ({"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 5}, (FULL, SLIDING)),
        ({"layer_types": [CHUNKED, FULL], "attention_chunk_size": 5}, (CHUNKED, FULL)),
        ({"layer_types": None, "sliding_window": 5}, (SLIDING,)),
    ],
)
def test_kinds_are_read_from_the_config(settings, kinds):
    masks = MaskKinds.from_config(config(**settings))
    assert masks.kinds == kinds
    assert not masks.additive
    assert masks.window == (settings.get("sliding_window") or 0)
    assert masks.chunk == (settings.get("attention_chunk_size") or 0)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_attention_without_a_mask_is_refused(implementation):
    with pytest.raises(TargetError, match="takes no tree mask; load the model with attn_implementation"):
        MaskKinds.from_config(SimpleNamespace(_attn_implementation=implementation))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["compressed_sparse_attention", FULL]}, "'compressed_sparse_attention' keep more than keys"),
        ({"layer_types": [SLIDING], "sliding_window": None}, "'sliding_attention' but gives no size"),
        ({"layer_types": [CHUNKED]}, "'chunked_attention' but gives no size"),
    ],
)
def test_layers_of_unknown_kind_or_size_are_refused(settings, message):
    with pytest.raises(TargetError, match=message):
        MaskKinds.from_config(config(**settings))
