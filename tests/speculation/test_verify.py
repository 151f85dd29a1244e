import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation.toys import FITS, MISSES, fit, joint_counts, markov, mutant

from eyas.core import Draft
from eyas.speculation import verify
from eyas.speculation.tree import chain
from eyas.speculation.verify import accept, rejection_accept

VOCAB = 4
SAMPLES = 2000
START = 1
P, Q = markov(3, VOCAB).double().softmax(-1), markov(4, VOCAB).double().softmax(-1)
EXACT = [float(P[START, a] * P[a, b]) for a in range(VOCAB) for b in range(VOCAB)]


@st.composite
def drafts_and_choices(draw):
    """A batch of one size: any trees, padding at the end, and places where the target could choose nothing."""
    count = draw(st.integers(1, 15))
    batch = draw(st.integers(1, 4))
    parents = []
    for _ in range(batch):
        used = draw(st.integers(1, count))
        parents.append([-1, *(draw(st.integers(0, node - 1)) for node in range(1, used)), *[-1] * (count - used)])
    # three tokens: duplicate siblings abound
    token_lists, choice_lists = (
        st.lists(st.lists(st.sampled_from(ids), min_size=count, max_size=count), min_size=batch, max_size=batch)
        for ids in ([0, 1, 2], [0, 0, 1, 1, 2, 2, -1])
    )
    return draw(token_lists), parents, draw(choice_lists)


def walk(node, tokens, parents, chosen):
    for child, parent in enumerate(parents):
        if child and parent == node and tokens[child] == chosen[node]:
            return [node, *walk(child, tokens, parents, chosen)]
    return [node]


def check(draft, tokens, parents, chosen):
    """Against the walk from the root, sequence by sequence."""
    acceptance = accept(draft, torch.tensor(chosen))
    assert acceptance.path.shape == acceptance.tokens.shape == draft.tokens.shape
    assert acceptance.counts.dtype == acceptance.path.dtype == acceptance.tokens.dtype == torch.int64
    for row in range(len(tokens)):
        path = walk(0, tokens[row], parents[row], chosen[row])
        assert acceptance.counts[row] == len(path)
        assert acceptance.path[row].tolist() == path + [0] * (len(tokens[row]) - len(path))
        assert acceptance.tokens[row, : len(path)].tolist() == [chosen[row][node] for node in path]


def depths_of(parents):
    depths = []
    for node, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if node and parent >= 0 else 0)
    return depths


@settings(deadline=None, max_examples=300)
@given(drafts_and_choices())
def test_accept_is_the_walk_from_the_root(case):
    tokens, parents, _ = case
    depths = [depths_of(row) for row in parents]
    draft = Draft(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths))
    check(draft, *case)


@settings(deadline=None, max_examples=100)
@given(drafts_and_choices())
def test_accept_of_chains_is_the_walk_from_the_root(case):
    tokens, _, chosen = case
    parents = [list(range(-1, len(row) - 1)) for row in tokens]
    check(chain(torch.tensor(tokens)), tokens, parents, chosen)


def test_accept_leaves_its_arguments_alone():
    draft = Draft(torch.tensor([[9, 5, 5, 6]]), torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]]))
    chosen = torch.tensor([[5, 6, 0, 7]])
    accept(draft, chosen)
    assert draft.tokens.tolist() == [[9, 5, 5, 6]] and draft.parents.tolist() == [[-1, 0, 0, 1]]
    assert chosen.tolist() == [[5, 6, 0, 7]]


def test_accept_by_hand():
    acceptance = accept(
        chain(torch.tensor([[9, 5, 6, 7]] * 4)), torch.tensor([[5, 6, 7, 8], [5, 1, 7, 8], [1, 6, 7, 8], [5, -1, 7, 8]])
    )
    assert acceptance.counts.tolist() == [4, 2, 1, 2]  # a later match is no match
    assert acceptance.path.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    emitted = [row[:n] for row, n in zip(acceptance.tokens.tolist(), acceptance.counts.tolist(), strict=True)]
    assert emitted == [[5, 6, 7, 8], [5, 1], [1], [5, -1]]
    root = accept(chain(torch.tensor([[9]])), torch.tensor([[3]]))
    assert (root.counts.tolist(), root.path.tolist(), root.tokens.tolist()) == ([1], [[0]], [[3]])


# The p/q reference. Each method drafts below START with its own generator and emits at least two tokens.


def chain_draft(draws):
    first = torch.multinomial(Q[START], 1, generator=draws)
    second = torch.multinomial(Q[first[0]], 1, generator=draws)
    draft = chain(torch.cat((torch.tensor([START]), first, second))[None])
    return draft, torch.stack((Q[START], Q[START], Q[first[0]]))


def sibling_draft(draws, replacement):
    children = torch.multinomial(Q[START], 3, replacement, generator=draws)
    drafted = Q[START].repeat(4, 1)
    if not replacement:
        for i in (1, 2):
            drafted[i + 1 :, children[i - 1]] = 0
    tokens = torch.cat((torch.tensor([START]), children))
    return Draft(tokens[None], torch.tensor([[-1, 0, 0, 0]]), torch.tensor([[0, 1, 1, 1]])), drafted / drafted.sum(
        -1, keepdim=True
    )


def top_k_draft(draws):
    """Two likeliest children, and the likeliest grandchild of each: no draws at all."""
    children = Q[START].topk(2).indices
    tokens = torch.cat((torch.tensor([START]), children, Q[children].argmax(-1)))
    return Draft(tokens[None], torch.tensor([[-1, 0, 0, 1, 2]]), torch.tensor([[0, 1, 1, 2, 2]])), None


def pairs_emitted(make_draft, rule=rejection_accept, same_stream=False):
    draws, verdicts = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
    pairs, accepted = [], 0
    for sample in range(SAMPLES):
        if same_stream:  # a planted bug: acceptance replays the noise that made the draft
            draws.manual_seed(sample)
            verdicts.manual_seed(sample)
        draft, drafted = make_draft(draws)
        acceptance = rule(draft, P[draft.tokens[0]], drafted, verdicts)
        tokens = acceptance.tokens[0].tolist()
        accepted += len(tokens) - 1
        if len(tokens) == 1:
            tokens += torch.multinomial(P[tokens[0]], 1, generator=verdicts).tolist()
        pairs.append(tokens[:2])
    return pairs, accepted / SAMPLES


def rejection_fit(make_draft, **bugs):
    return fit(joint_counts(pairs_emitted(make_draft, **bugs)[0], VOCAB), EXACT)


METHODS = {
    "chain": chain_draft,
    "siblings": lambda draws: sibling_draft(draws, True),
    "siblings without replacement": lambda draws: sibling_draft(draws, False),
    "deterministic tree": top_k_draft,
}


def test_rejection_emits_the_targets_distribution():
    for name, method in METHODS.items():
        assert rejection_fit(method) > FITS, name


def test_rejection_accepts_the_overlap():
    _, accepted = pairs_emitted(lambda draws: (chain(chain_draft(draws)[0].tokens[:, :2]), Q[START].repeat(2, 1)))
    assert abs(accepted - torch.minimum(P[START], Q[START]).sum()) < 0.04


def test_the_test_sees_acceptance_with_q_instead_of_p():
    accepts_q = mutant(verify.rejection_accept, "* q[x] < p[x]", "< q[x]")
    for name, method in METHODS.items():
        assert rejection_fit(method, rule=accepts_q) < MISSES, name


def test_the_test_sees_a_residual_without_subtraction():
    keeps_p = mutant(verify.rejection_accept, "p = (p - q).clamp(min=0)", "p = p.clone()")
    for name, method in METHODS.items():
        assert rejection_fit(method, rule=keeps_p) < MISSES, name


def test_the_test_sees_noise_shared_by_draft_and_acceptance():
    def inverse_draft(draws):
        token = int((torch.rand((), generator=draws) > Q[START].cumsum(-1)).sum())
        return chain(torch.tensor([[START, token]])), Q[START].repeat(2, 1)

    assert rejection_fit(inverse_draft) > FITS
    assert rejection_fit(inverse_draft, same_stream=True) < MISSES


def test_the_test_sees_a_raw_q_for_a_processed_draft():
    """The draft comes from a colder distribution than the q it is judged by."""

    def cold_draft(draws):
        cold = Q[START] ** 2 / (Q[START] ** 2).sum()
        token = torch.multinomial(cold, 1, generator=draws)
        return chain(torch.cat((torch.tensor([START]), token))[None]), Q[START].repeat(2, 1)

    assert rejection_fit(cold_draft) < MISSES
