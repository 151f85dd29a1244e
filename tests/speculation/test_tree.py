import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.core import Draft, DraftShape
from eyas.speculation.tree import TreeBuilder, ancestor_mask, chain, path_tokens


@st.composite
def shapes(draw):
    k = draw(st.integers(1, 4))
    steps = draw(st.integers(1, 4))
    if k == 1:
        return DraftShape(steps, 1, steps + 1)
    return DraftShape(steps, k, draw(st.integers(2, 1 + k + (steps - 1) * k * k)))


@st.composite
def parent_lists(draw):
    """Any tree: each node's parent is an earlier node."""
    return (-1, *(draw(st.integers(0, i)) for i in range(draw(st.integers(0, 12)))))


def drafter_scores(path, vocab, seed, levels, cut):
    """The log-probabilities after a path of tokens: a function of the path, with ties if few levels, -inf where cut."""
    generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
    logits = torch.randint(levels, (vocab,), generator=generator) * (8.0 / levels)
    logits[torch.rand(vocab, generator=generator) < cut] = -math.inf
    if logits.isinf().all():
        logits[0] = 0
    return logits.log_softmax(-1)


def build(shape, vocab, seed, levels, cut):
    builder = TreeBuilder(shape, root_token=99)
    builder.expand(drafter_scores((), vocab, seed, levels, cut))
    for _ in range(shape.num_steps - 1):
        rows = [drafter_scores(tuple(path), vocab, seed, levels, cut) for path in builder.paths().tolist()]
        builder.expand(torch.stack(rows))
    return builder.finish()


def brute_force(shape, vocab, seed, levels, cut):
    """{path: score} of all candidates, by SGLang's rules over dictionaries of paths."""
    frontier, candidates = {(): 0.0}, {}
    for _ in range(shape.num_steps):
        level = {}
        for path, score in frontier.items():
            scores = drafter_scores(path, vocab, seed, levels, cut)
            for token in scores.topk(min(shape.eagle_topk, vocab)).indices.tolist():
                level[(*path, token)] = (torch.tensor(score) + scores[token]).item()
        best = sorted(level, key=lambda path: -level[path])[: min(shape.eagle_topk, vocab)]
        frontier = {path: level[path] for path in best}
        candidates |= level
    return {path: score for path, score in candidates.items() if score > -math.inf}


def node_paths(draft):
    return [tuple(t for t in path if t >= 0) for path in path_tokens(draft).tolist()]


cases = {
    "shape": shapes(),
    "vocab": st.integers(1, 7),
    "seed": st.integers(0, 999),
    "levels": st.sampled_from([2, 4, 1 << 20]),
    "cut": st.sampled_from([0.0, 0.5, 0.9]),
}


@settings(deadline=None, max_examples=150)
@given(**cases)
def test_a_draft_is_a_tree_in_level_order(shape, vocab, seed, levels, cut):
    draft = build(shape, vocab, seed, levels, cut)
    count = len(draft.tokens)
    assert draft.tokens.dtype == torch.int64 and draft.tokens[0] == 99
    assert len(draft.parents) == len(draft.depths) == count
    assert draft.parents[0] == -1 and draft.depths[0] == 0
    assert all(0 <= draft.parents[i] < i for i in range(1, count))
    assert all(draft.depths[i] == draft.depths[draft.parents[i]] + 1 for i in range(1, count))
    assert list(draft.depths) == sorted(draft.depths) and draft.depths[-1] <= shape.num_steps
    assert len(set(node_paths(draft))) == count  # no duplicate siblings
    # As large as asked, unless the candidates (without the cut tokens) run out.
    assert count == min(shape.num_draft_tokens, 1 + len(brute_force(shape, vocab, seed, levels, cut)))


@settings(deadline=None, max_examples=150)
@given(**cases)
def test_the_best_candidates_are_chosen(shape, vocab, seed, levels, cut):
    draft = build(shape, vocab, seed, levels, cut)
    scores = brute_force(shape, vocab, seed, levels, cut)
    chosen = node_paths(draft)[1:]
    if levels > 100:  # no ties: exactly the same nodes
        assert set(chosen) == set(sorted(scores, key=lambda path: -scores[path])[: shape.num_draft_tokens - 1])

    def score(path):
        return sum(drafter_scores(path[:i], vocab, seed, levels, cut)[path[i]].item() for i in range(len(path)))

    assert sorted(map(score, chosen)) == pytest.approx(sorted(scores.values())[-len(chosen) :] if chosen else [])


@settings(deadline=None, max_examples=60)
@given(steps=st.integers(1, 3), k=st.integers(2, 4), vocab=st.integers(4, 6), seed=st.integers(0, 999))
def test_a_small_tree_is_the_best_of_all_trees(steps, k, vocab, seed):
    """With no more than k nodes the frontier cannot lose any of the globally best paths."""

    def extend(path, score, depth):
        if depth == steps:
            return {}
        found = {}
        for token, value in enumerate(drafter_scores(path, vocab, seed, 1 << 20, 0.0).tolist()):
            found[(*path, token)] = score + value
            found |= extend((*path, token), score + value, depth + 1)
        return found

    paths = extend((), 0.0, 0)
    draft = build(DraftShape(steps, k, k + 1), vocab, seed, 1 << 20, 0.0)
    assert set(node_paths(draft)[1:]) == set(sorted(paths, key=lambda path: -paths[path])[:k])


@settings(deadline=None, max_examples=40)
@given(steps=st.integers(1, 6), vocab=st.integers(1, 9), seed=st.integers(0, 999))
def test_top_k_1_is_the_chain_of_argmaxes(steps, vocab, seed):
    tokens: tuple[int, ...] = ()
    for _ in range(steps):
        tokens += (int(drafter_scores(tokens, vocab, seed, 1 << 20, 0.0).argmax()),)
    draft, expected = build(DraftShape(steps, 1, steps + 1), vocab, seed, 1 << 20, 0.0), chain([99, *tokens])
    assert torch.equal(draft.tokens, expected.tokens)
    assert (draft.parents, draft.depths) == (expected.parents, expected.depths)


def test_frontier_rows_say_which_state_to_continue():
    builder = TreeBuilder(DraftShape(3, 2, 11), root_token=9)
    first = builder.expand(torch.tensor([0.6, 0.3, 0.1]).log())
    assert first.tokens.tolist() == [0, 1] and first.rows.tolist() == [0, 0]
    second = builder.expand(torch.tensor([[0.5, 0.4, 0.1], [0.01, 0.01, 0.98]]).log())
    # 0.6 * 0.5 = 0.30, 0.3 * 0.98 = 0.294, 0.6 * 0.4 = 0.24
    assert second.tokens.tolist() == [0, 2] and second.rows.tolist() == [0, 1]
    assert second.scores.exp().tolist() == pytest.approx([0.3, 0.294])
    third = builder.expand(torch.tensor([[0.2, 0.2, 0.6], [1.0, 0.0, 0.0]]).log())
    assert third.rows.tolist() == [1, 0]
    assert builder.paths().tolist() == [[1, 2, 0], [0, 0, 2]]
    draft = builder.finish()
    assert draft.tokens.tolist()[0] == 9 and len(draft.tokens) == 10  # the token with probability 0 is not drafted


def test_columns_of_a_reduced_vocabulary():
    builder = TreeBuilder(DraftShape(2, 2, 3), root_token=9)
    ids = torch.tensor([10, 20, 30])
    frontier = builder.expand(torch.tensor([0.6, 0.3, 0.1]).log(), ids)
    assert frontier.tokens.tolist() == [10, 20]
    builder.expand(torch.tensor([[0.1, 0.1, 0.8], [0.4, 0.3, 0.3]]).log(), ids)
    assert builder.finish().tokens.tolist() == [9, 10, 30]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_broken_drafter_drafts_nothing(k, bad):
    builder = TreeBuilder(DraftShape(2, k, 3), root_token=4)
    frontier = builder.expand(torch.full((5,), bad))
    builder.expand(torch.zeros(len(frontier.tokens), 5).log_softmax(-1))
    draft = builder.finish()
    assert (draft.tokens.tolist(), draft.parents, draft.depths) == ([4], (-1,), (0,))


def test_a_chain_ends_where_nothing_is_left():
    builder = TreeBuilder(DraftShape(3, 1, 4), root_token=4)
    for row in ([0.0, -1.0], [-math.inf, -math.inf], [0.0, -1.0]):
        builder.expand(torch.tensor(row))
    assert builder.finish().tokens.tolist() == [4, 0]


def test_positive_rounding_in_scores_cannot_orphan_a_child():
    builder = TreeBuilder(DraftShape(3, 2, 3), root_token=0)
    builder.expand(torch.tensor([-0.5, -0.6]))
    builder.expand(torch.tensor([[1e-6, -9.0], [1e-6, -9.0]]))
    builder.expand(torch.tensor([[1e-6, -9.0], [1e-6, -9.0]]))
    draft = builder.finish()
    assert draft.parents == (-1, 0, 1)


def test_nothing_expanded_is_the_root_alone():
    builder = TreeBuilder(DraftShape(), root_token=7)
    assert builder.paths().shape == (1, 0)
    assert builder.finish().tokens.tolist() == [7]


def test_chain_takes_lists_and_tensors():
    for tokens in ([5, 6, 7], torch.tensor([5, 6, 7])):
        draft = chain(tokens)
        assert draft.tokens.tolist() == [5, 6, 7]
        assert (draft.parents, draft.depths) == ((-1, 0, 1), (0, 1, 2))


@given(parents=parent_lists())
def test_ancestor_mask_by_naive_walk(parents):
    mask = ancestor_mask(parents)
    assert mask.dtype == torch.bool and mask.shape == (len(parents), len(parents))
    for node in range(len(parents)):
        walked, at = set(), node
        while at >= 0:
            walked.add(at)
            at = parents[at]
        assert set(mask[node].nonzero()[:, 0].tolist()) == walked


@given(parents=parent_lists())
def test_path_tokens_by_naive_walk(parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = torch.arange(len(parents)) + 50
    paths = path_tokens(Draft(tokens, parents, tuple(depths)))
    assert paths.shape == (len(parents), max(depths))
    for node in range(len(parents)):
        walked, at = [], node
        while at > 0:
            walked.append(int(tokens[at]))
            at = parents[at]
        assert paths[node].tolist() == walked[::-1] + [-1] * (max(depths) - len(walked))
