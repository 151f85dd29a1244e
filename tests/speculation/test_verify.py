import torch
from hypothesis import given
from hypothesis import strategies as st
from speculation.toys import FITS, MISSES, fit, joint_counts, markov, mutant

from eyas.core import Acceptance, Draft
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
    parents, depths = [-1], [0]
    for node in range(draw(st.integers(0, 14))):
        parents.append(draw(st.integers(0, node)))
        depths.append(depths[parents[-1]] + 1)
    token_lists = st.lists(st.integers(0, 2), min_size=len(parents), max_size=len(parents))
    tokens, chosen = draw(token_lists), draw(token_lists)  # three tokens: duplicate siblings abound
    return Draft(torch.tensor(tokens), tuple(parents), tuple(depths)), chosen


@given(drafts_and_choices())
def test_accept_is_the_walk_from_the_root(case):
    draft, chosen = case

    def walk(node):
        for child, parent in enumerate(draft.parents):
            if parent == node and int(draft.tokens[child]) == chosen[node]:
                return [node, *walk(child)]
        return [node]

    path = walk(0)
    expected = Acceptance(tuple(path), tuple(chosen[node] for node in path))
    assert accept(draft, chosen) == expected
    assert accept(draft, torch.tensor(chosen)) == expected


def test_accept_of_a_chain_and_of_the_root_alone():
    draft = chain([9, 5, 6, 7])
    assert accept(draft, [5, 6, 7, 8]) == Acceptance((0, 1, 2, 3), (5, 6, 7, 8))
    assert accept(draft, [5, 1, 7, 8]) == Acceptance((0, 1), (5, 1))
    assert accept(draft, [1, 6, 7, 8]) == Acceptance((0,), (1,))  # a later match is no match
    assert accept(chain([9]), torch.tensor([3])) == Acceptance((0,), (3,))


# The p/q reference. Each method drafts below START with its own generator and emits at least two tokens.


def chain_draft(draws):
    first = torch.multinomial(Q[START], 1, generator=draws)
    second = torch.multinomial(Q[first[0]], 1, generator=draws)
    draft = chain(torch.cat((torch.tensor([START]), first, second)))
    return draft, torch.stack((Q[START], Q[START], Q[first[0]]))


def sibling_draft(draws, replacement):
    children = torch.multinomial(Q[START], 3, replacement, generator=draws)
    drafted = Q[START].repeat(4, 1)
    if not replacement:
        for i in (1, 2):
            drafted[i + 1 :, children[i - 1]] = 0
    tokens = torch.cat((torch.tensor([START]), children))
    return Draft(tokens, (-1, 0, 0, 0), (0, 1, 1, 1)), drafted / drafted.sum(-1, keepdim=True)


def top_k_draft(draws):
    """Two likeliest children, and the likeliest grandchild of each: no draws at all."""
    children = Q[START].topk(2).indices
    tokens = torch.cat((torch.tensor([START]), children, Q[children].argmax(-1)))
    return Draft(tokens, (-1, 0, 0, 1, 2), (0, 1, 1, 2, 2)), None


def pairs_emitted(make_draft, rule=rejection_accept, same_stream=False):
    draws, verdicts = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
    pairs, accepted = [], 0
    for sample in range(SAMPLES):
        if same_stream:  # a planted bug: acceptance replays the noise that made the draft
            draws.manual_seed(sample)
            verdicts.manual_seed(sample)
        draft, drafted = make_draft(draws)
        acceptance = rule(draft, P[draft.tokens], drafted, verdicts)
        tokens = [*acceptance.tokens]
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
    _, accepted = pairs_emitted(lambda draws: (chain(chain_draft(draws)[0].tokens[:2]), Q[START].repeat(2, 1)))
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
        return chain([START, token]), Q[START].repeat(2, 1)

    assert rejection_fit(inverse_draft) > FITS
    assert rejection_fit(inverse_draft, same_stream=True) < MISSES


def test_the_test_sees_a_raw_q_for_a_processed_draft():
    """The draft comes from a colder distribution than the q it is judged by."""

    def cold_draft(draws):
        cold = Q[START] ** 2 / (Q[START] ** 2).sum()
        token = torch.multinomial(cold, 1, generator=draws)
        return chain(torch.cat((torch.tensor([START]), token))), Q[START].repeat(2, 1)

    assert rejection_fit(cold_draft) < MISSES
