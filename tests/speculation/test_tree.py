import math

import pytest
import torch
from hypothesis import assume, given, settings
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
def drafts(draw):
    """A batch of any trees (each node's parent is an earlier node) of one size, with padding at the end."""
    count, batch = draw(st.integers(1, 13)), draw(st.integers(1, 3))
    parents, depths = [], []
    for _ in range(batch):
        used = draw(st.integers(1, count))
        row, depth = [-1], [0]
        for node in range(1, used):
            row.append(draw(st.integers(0, node - 1)))
            depth.append(depth[row[-1]] + 1)
        parents.append(row + [-1] * (count - used))
        depths.append(depth + [0] * (count - used))
    tokens = torch.arange(batch * count).view(batch, count) + 50
    return Draft(tokens, torch.tensor(parents), torch.tensor(depths))


def drafter_scores(path, vocab, seed, levels, cut):
    """The log-weights after a path of tokens: a function of the path, with ties if few levels, -inf where cut."""
    generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
    logits = torch.randint(levels, (vocab,), generator=generator) * (8.0 / levels)
    logits[torch.rand(vocab, generator=generator) < cut] = -math.inf
    if logits.isinf().all():
        logits[0] = 0
    return logits + len(path)  # not normalised


def log_probabilities(*case):
    return drafter_scores(*case).log_softmax(-1)


def build(shape, vocab, seeds, levels, cut):
    """A batch of drafts, one for each seed, rooted at 99, 100, ..."""
    builder = TreeBuilder(shape, torch.arange(len(seeds)) + 99)
    for _ in range(shape.num_steps):
        rows = [
            [drafter_scores(tuple(path), vocab, seed, levels, cut) for path in paths]
            for seed, paths in zip(seeds, builder.paths().tolist(), strict=True)
        ]
        builder.expand(torch.stack([torch.stack(row) for row in rows]))
    return builder.finish()


def brute_force(shape, vocab, seed, levels, cut):
    """{path: score} of all candidates, by SGLang's rules over dictionaries of paths."""
    frontier, candidates = {(): 0.0}, {}
    for _ in range(shape.num_steps):
        level = {}
        for path, score in frontier.items():
            scores = log_probabilities(path, vocab, seed, levels, cut)
            for token in scores.topk(min(shape.eagle_topk, vocab)).indices.tolist():
                level[(*path, token)] = (torch.tensor(score) + scores[token]).item()
        best = sorted(level, key=lambda path: -level[path])[: min(shape.eagle_topk, vocab)]
        frontier = {path: level[path] for path in best}
        candidates |= level
    return {path: score for path, score in candidates.items() if score > -math.inf}


def node_paths(draft, row=0):
    """Of one sequence, without its padding."""
    paths = [tuple(t for t in path if t >= 0) for path in path_tokens(draft)[row].tolist()]
    return paths if draft.parents is None else paths[: 1 + int((draft.parents[row] >= 0).sum())]


cases = {
    "shape": shapes(),
    "vocab": st.integers(1, 7),
    "seeds": st.lists(st.integers(0, 999), min_size=1, max_size=3),
    "levels": st.sampled_from([2, 4, 1 << 20]),
    "cut": st.sampled_from([0.0, 0.5, 0.9]),
}


@settings(deadline=None, max_examples=150)
@given(**cases)
def test_a_draft_is_a_tree_in_level_order(shape, vocab, seeds, levels, cut):
    draft = build(shape, vocab, seeds, levels, cut)
    assert draft.tokens.dtype == torch.int64 and draft.tokens[:, 0].tolist() == [99 + row for row in range(len(seeds))]
    if shape.eagle_topk == 1:
        assert draft.parents is None and draft.depths is None
        assert draft.tokens.shape == (len(seeds), shape.num_draft_tokens)
        return
    k = min(shape.eagle_topk, vocab)
    assert draft.tokens.shape == (len(seeds), min(shape.num_draft_tokens, DraftShape.most_tokens(shape.num_steps, k)))
    assert draft.parents.shape == draft.depths.shape == draft.tokens.shape
    for row, seed in enumerate(seeds):
        tokens, parents, depths = (x[row].tolist() for x in (draft.tokens, draft.parents, draft.depths))
        # As large as asked, unless the candidates (without the cut tokens) run out.
        count = min(shape.num_draft_tokens, 1 + len(brute_force(shape, vocab, seed, levels, cut)))
        padding = len(tokens) - count
        assert tokens[count:] == [99 + row] * padding
        assert parents[count:] == [-1] * padding and depths[count:] == [0] * padding
        assert parents[0] == -1 and depths[0] == 0
        assert all(0 <= parents[i] < i for i in range(1, count))
        assert all(depths[i] == depths[parents[i]] + 1 for i in range(1, count))
        assert depths[:count] == sorted(depths[:count]) and depths[count - 1] <= shape.num_steps
        assert len(set(node_paths(draft, row))) == count  # no duplicate siblings


@settings(deadline=None, max_examples=150)
@given(**cases)
def test_the_best_candidates_are_chosen(shape, vocab, seeds, levels, cut):
    assume(shape.eagle_topk > 1)
    draft = build(shape, vocab, seeds, levels, cut)
    for row, seed in enumerate(seeds):
        scores = brute_force(shape, vocab, seed, levels, cut)
        chosen = node_paths(draft, row)[1:]
        if levels > 100:  # no ties: exactly the same nodes
            assert set(chosen) == set(sorted(scores, key=lambda path: -scores[path])[: shape.num_draft_tokens - 1])
        mine = [
            sum(log_probabilities(path[:i], vocab, seed, levels, cut)[path[i]].item() for i in range(len(path)))
            for path in chosen
        ]
        best = sorted(scores.values())[-len(chosen) :] if chosen else []
        assert sorted(mine) == pytest.approx(best, rel=1e-5, abs=1e-5)


@settings(deadline=None, max_examples=60)
@given(**cases)
def test_a_draft_does_not_depend_on_its_company(shape, vocab, seeds, levels, cut):
    together = build(shape, vocab, seeds, levels, cut)
    for row, seed in enumerate(seeds):
        alone = build(shape, vocab, [seed], levels, cut)
        assert torch.equal(alone.tokens[0, 1:], together.tokens[row, 1:].where(together.tokens[row, 1:] < 99, 99))
        if shape.eagle_topk > 1:
            assert torch.equal(alone.parents[0], together.parents[row])
            assert torch.equal(alone.depths[0], together.depths[row])


@settings(deadline=None, max_examples=60)
@given(steps=st.integers(1, 3), k=st.integers(2, 4), vocab=st.integers(4, 6), seed=st.integers(0, 999))
def test_a_small_tree_is_the_best_of_all_trees(steps, k, vocab, seed):
    """With no more than k nodes the frontier cannot lose any of the globally best paths."""

    def extend(path, score, depth):
        if depth == steps:
            return {}
        found = {}
        for token, value in enumerate(log_probabilities(path, vocab, seed, 1 << 20, 0.0).tolist()):
            found[(*path, token)] = score + value
            found |= extend((*path, token), score + value, depth + 1)
        return found

    paths = extend((), 0.0, 0)
    draft = build(DraftShape(steps, k, k + 1), vocab, [seed], 1 << 20, 0.0)
    assert set(node_paths(draft)[1:]) == set(sorted(paths, key=lambda path: -paths[path])[:k])


@settings(deadline=None, max_examples=40)
@given(steps=st.integers(1, 6), vocab=st.integers(1, 9), seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3))
def test_top_k_1_is_the_chain_of_argmaxes(steps, vocab, seeds):
    expected = []
    for row, seed in enumerate(seeds):
        tokens: tuple[int, ...] = ()
        for _ in range(steps):
            tokens += (int(drafter_scores(tokens, vocab, seed, 1 << 20, 0.0).argmax()),)
        expected.append([99 + row, *tokens])
    draft = build(DraftShape(steps, 1, steps + 1), vocab, seeds, 1 << 20, 0.0)
    assert draft.tokens.tolist() == expected
    assert draft.parents is None and draft.depths is None


def test_frontier_rows_say_which_state_to_continue():
    builder = TreeBuilder(DraftShape(3, 2, 11), torch.tensor([9, 8]))
    first = builder.expand(torch.tensor([[[0.6, 0.3, 0.1]], [[0.1, 0.1, 0.8]]]).log())
    assert first.tokens.tolist() == [[0, 1], [2, 0]] and first.rows.tolist() == [[0, 0], [0, 0]]
    level = torch.tensor([[0.5, 0.4, 0.1], [0.01, 0.01, 0.98]])
    second = builder.expand(torch.stack((level, level.flip(0))).log())
    # 0.6 * 0.5 = 0.30, 0.3 * 0.98 = 0.294, 0.6 * 0.4 = 0.24; and 0.8 * 0.98, 0.1 * 0.5, 0.1 * 0.4
    assert second.tokens.tolist() == [[0, 2], [2, 0]] and second.rows.tolist() == [[0, 1], [0, 1]]
    level = torch.tensor([[0.2, 0.2, 0.6], [1.0, 0.0, 0.0]])
    third = builder.expand(torch.stack((level, level)).log())
    assert third.rows.tolist() == [[1, 0], [0, 0]]
    assert builder.paths()[0].tolist() == [[1, 2, 0], [0, 0, 2]]
    assert builder.paths()[1, 0].tolist() == [2, 2, 2]
    draft = builder.finish()
    assert draft.tokens.shape == (2, 11) and draft.tokens[:, 0].tolist() == [9, 8]
    # the token with probability 0 is not drafted: its place is padding
    assert (draft.parents[0] >= 0).sum() == 9
    assert (draft.tokens[0, -1], draft.parents[0, -1], draft.depths[0, -1]) == (9, -1, 0)


def test_columns_of_a_reduced_vocabulary():
    ids = torch.tensor([10, 20, 30])
    levels = [torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([[0.1, 0.1, 0.8], [0.4, 0.3, 0.3]]).log()]
    builder = TreeBuilder(DraftShape(2, 2, 3), torch.tensor([9]))
    assert builder.expand(levels[0][None], ids).tokens.tolist() == [[10, 20]]
    builder.expand(levels[1][None], ids)
    assert builder.finish().tokens.tolist() == [[9, 10, 30]]
    builder = TreeBuilder(DraftShape(2, 1, 3), torch.tensor([9]))
    assert builder.expand(levels[0][None], ids).tokens.tolist() == [[10]]
    builder.expand(levels[1][None, :1], ids)
    assert builder.finish().tokens.tolist() == [[9, 10, 30]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_broken_drafter_drafts_nothing_and_its_company_does(bad, broken):
    builder = TreeBuilder(DraftShape(2, 3, 5), torch.tensor([4, 4]))
    scores = torch.zeros(2, 1, 5)
    scores[broken] = bad
    frontier = builder.expand(scores)
    assert ((frontier.tokens >= 0) & (frontier.tokens < 5)).all()  # can be embedded
    builder.expand(torch.zeros(2, 3, 5))
    draft = builder.finish()
    assert draft.tokens[broken].tolist() == [4] * 5
    assert draft.parents[broken].tolist() == [-1] * 5 and draft.depths[broken].tolist() == [0] * 5
    assert (draft.parents[1 - broken, 1:] >= 0).all()


def test_one_bad_number_makes_no_node():
    builder = TreeBuilder(DraftShape(1, 2, 3), torch.tensor([4]))
    builder.expand(torch.tensor([[[0.0, math.nan, 1.0]]]))
    assert builder.finish().parents.tolist() == [[-1, -1, -1]]  # a softmax with a NaN in it is NaN throughout


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_chain_takes_what_it_gets(bad):
    builder = TreeBuilder(DraftShape(3, 1, 4), torch.tensor([4]))
    for row in ([0.0, -1.0], [bad, bad], [-1.0, 0.0]):
        builder.expand(torch.tensor([[row]]))
    assert builder.finish().tokens.tolist() == [[4, 0, 0, 1]]


def test_rounding_cannot_orphan_a_child():
    builder = TreeBuilder(DraftShape(3, 2, 3), torch.tensor([0]))
    builder.expand(torch.tensor([[[-0.5, -0.6]]]))
    for _ in range(2):  # all but certain: log-probabilities of 0, whatever the rounding
        builder.expand(torch.tensor([[[1e6 + 0.3, -9.0], [1e6 + 0.7, -9.0]]]))
    assert builder.finish().parents.tolist() == [[-1, 0, 1]]


def test_ties_go_to_the_older_candidate():
    builder = TreeBuilder(DraftShape(2, 2, 4), torch.tensor([0]))
    builder.expand(torch.tensor([[[0.0, 0.0]]]))  # two children of 1/2
    builder.expand(torch.tensor([[[0.0, -math.inf], [0.0, -math.inf]]]))  # each followed by certainty: all four 1/2
    assert builder.finish().parents.tolist() == [[-1, 0, 0, 1]]


def test_nothing_expanded_is_the_root_alone():
    builder = TreeBuilder(DraftShape(), torch.tensor([7, 8]))
    assert builder.paths().shape == (2, 1, 0)
    assert builder.finish().tokens.tolist() == [[7], [8]]


def naive_path(parents, node):
    """From the node up to the root; padding hangs below the root."""
    path = [node]
    while path[-1] > 0:
        path.append(max(parents[path[-1]], 0))
    return path


@settings(deadline=None)
@given(draft=drafts())
def test_ancestor_mask_by_naive_walk(draft):
    mask = ancestor_mask(draft)
    batch, count = draft.tokens.shape
    assert mask.dtype == torch.bool and mask.shape == (batch, count, count)
    for row in range(batch):
        for node in range(count):
            walked = set(naive_path(draft.parents[row].tolist(), node))
            assert set(mask[row, node].nonzero()[:, 0].tolist()) == walked


@settings(deadline=None)
@given(draft=drafts())
def test_path_tokens_by_naive_walk(draft):
    paths = path_tokens(draft)
    batch, count = draft.tokens.shape
    assert paths.dtype == torch.int64 and paths.shape == (batch, count, count - 1)
    for row in range(batch):
        parents = draft.parents[row].tolist()
        for node in range(count):
            walked = [] if parents[node] < 0 else naive_path(parents, node)[-2::-1]
            tokens = [int(draft.tokens[row, at]) for at in walked]
            assert paths[row, node].tolist() == tokens + [-1] * (count - 1 - len(walked))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 17])
def test_a_chain_is_the_tree_it_stands_for(count):
    draft = chain(torch.arange(2 * count).view(2, count))
    tree = Draft(draft.tokens, torch.arange(-1, count - 1).expand(2, -1), torch.arange(count).expand(2, -1))
    assert torch.equal(ancestor_mask(draft), ancestor_mask(tree))
    assert torch.equal(path_tokens(draft), path_tokens(tree))
