import dataclasses
import math

import pytest
import torch
from speculation import toys
from speculation.toys import (
    FITS,
    MISSES,
    PROMPT,
    REDUCED,
    SETTINGS,
    STOP_IDS,
    TARGET,
    VOCAB,
    Toy,
    fit,
    markov,
    mutant,
    reference,
)
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas.core import Draft, NonFiniteLogitsError, RequestError, SamplingParams
from eyas.speculation import sampling
from eyas.speculation.sampling import (
    TokenHistory,
    check_bias,
    choose,
    draft_scores,
    logprobs,
    needs_history,
    no_choice,
    perturbed,
    process_logits,
    rows_of,
)
from eyas.speculation.tree import chain

INF = math.inf
DRAWS = 20_000


def process(row, params, index=0, **more):
    return process_logits(torch.as_tensor(row, dtype=torch.float32)[None], params, output_indices=[index], **more)[0]


def choice(logits, params, indices, history=None, stop_ids=()):
    """Of a batch of sequences with one node each."""
    sequences = [Toy(params, int(index), history, stop_ids) for index in indices]
    return choose(logits[:, None], rows_of(sequences), chain(torch.zeros(len(sequences), 1, dtype=torch.int64)))


def pick(*args, **more):
    """The tokens of a choice in which nothing went wrong."""
    chosen = choice(*args, **more)
    assert chosen.finite.all() and (chosen.tokens >= 0).all()
    return chosen.tokens[:, 0]


def kept(row, params, **more):
    return (process(row, params, **more) > -INF).nonzero()[:, 0].tolist()


def test_nothing_to_do_is_free():
    logits = torch.randn(3, 8)
    assert process_logits(logits, SamplingParams(), output_indices=[0, 1, 2]) is logits
    assert process_logits(logits, SamplingParams(temperature=1), output_indices=[0, 1, 2]) is logits
    cast = process_logits(logits.bfloat16(), SamplingParams(), output_indices=[0, 1, 2])
    assert cast.dtype == torch.float32


@pytest.mark.parametrize("name", SETTINGS)
def test_processed_distribution_and_inputs_left_alone(name):
    params = toys.sampling(name)
    logits = TARGET.clone()
    for output in ([], [5], [4, 4, 1]):
        history = TokenHistory.from_tokens(PROMPT, output, VOCAB)
        weights = process_logits(
            logits, params, output_indices=[len(output)] * VOCAB, history=history, stop_ids=STOP_IDS
        )
        expected = [reference(row, params, output) for row in TARGET.tolist()]
        torch.testing.assert_close(weights.softmax(-1), torch.tensor(expected), atol=1e-6, rtol=1e-4)
    assert torch.equal(logits, TARGET)


@pytest.mark.parametrize("name", SETTINGS)
def test_choices_follow_the_processed_distribution(name):
    """Over output indices, where draws are cheap; ``test_lossless`` does it over seeds."""
    params, output = toys.sampling(name, seed=11), [4, 4, 1]
    history = TokenHistory.from_tokens(PROMPT, output, VOCAB) if needs_history(params) else None
    count = DRAWS // 10 if history else DRAWS  # with a history each sequence goes its own way
    tokens = pick(TARGET[1].expand(count, -1), params, torch.arange(count) + 3, history, STOP_IDS)
    assert fit(tokens.bincount(minlength=VOCAB).tolist(), reference(TARGET[1].tolist(), params, output)) > FITS


def test_the_test_sees_a_wrong_distribution():
    tokens = pick(TARGET[1].expand(DRAWS, -1), toys.sampling("plain"), torch.arange(DRAWS))
    counts = tokens.bincount(minlength=VOCAB).tolist()
    assert fit(counts, reference(TARGET[1].tolist(), toys.sampling("plain"))) > FITS
    for name in ("cold", "hot", "top_k", "top_p", "min_p", "bias", "repetition", "min_tokens"):
        assert fit(counts, reference(TARGET[1].tolist(), toys.sampling(name))) < MISSES, name


def test_choices_follow_over_seeds():
    rows = rows_of([Toy(SamplingParams(temperature=1, seed=seed)) for seed in range(3000)])
    assert len(rows.groups) == 1
    tokens = choose(TARGET[:1].expand(3000, 1, -1), rows, chain(torch.zeros(3000, 1, dtype=torch.int64))).tokens[:, 0]
    assert fit(tokens.bincount(minlength=VOCAB).tolist(), TARGET[0].softmax(-1).tolist()) > FITS


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_transformers(seed):
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(5, 300, generator=draw)
    prompt, output = torch.randint(300, (20,), generator=draw), torch.randint(300, (7,), generator=draw)
    cases = [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1, min_p=0.1),
        SamplingParams(temperature=1, top_k=17),
        SamplingParams(temperature=1, top_p=0.8),
        SamplingParams(temperature=1, repetition_penalty=1.4),
        SamplingParams(temperature=1.3, repetition_penalty=0.8, min_p=0.01, top_k=40, top_p=0.93),
    ]
    for params in cases:
        warpers = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        warpers.append(MinPLogitsWarper(params.min_p))
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        warpers.append(TopPLogitsWarper(params.top_p))
        expected = warpers(torch.cat((prompt, output)).repeat(5, 1), logits.clone())
        history = TokenHistory.from_tokens(prompt, output, 300)
        weights = process_logits(logits, params, output_indices=[7] * 5, history=history)
        torch.testing.assert_close(weights.log_softmax(-1), expected.log_softmax(-1))


def test_repetition_penalty_by_sign():
    history = TokenHistory.from_tokens([0, 1], [2, 3], 6)
    weights = process([2.0, -2.0, 3.0, -3.0, 4.0, -4.0], SamplingParams(repetition_penalty=2), history=history)
    assert weights.tolist() == [1.0, -4.0, 1.5, -6.0, 4.0, -4.0]


def test_frequency_and_presence_count_output_only():
    history = TokenHistory.from_tokens([0], [1, 2, 2], 4)
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    assert process([1.0, 1.0, 1.0, 1.0], params, history=history).tolist() == [1.0, 0.25, -0.25, 1.0]


def test_repetition_comes_before_frequency_and_after_bias():
    history = TokenHistory.from_tokens([], [0], 2)
    params = SamplingParams(repetition_penalty=2, frequency_penalty=1, logit_bias={0: 4})
    assert process([-2.0, 0.0], params, history=history)[0] == (-2 + 4) / 2 - 1


def test_min_p_uses_the_tempered_distribution_and_comes_before_top_k_and_top_p():
    row = torch.tensor([0.6, 0.3, 0.1]).log()
    assert kept(row, SamplingParams(temperature=1, min_p=0.4)) == [0, 1]
    assert kept(row, SamplingParams(temperature=0.5, min_p=0.4)) == [0]  # 0.36, 0.09, 0.01 before normalising
    assert kept(row, SamplingParams(temperature=1, min_p=1.0)) == [0]
    # 0.6 / 0.9 = 0.667 once the last token is cut: enough for top_p 0.65 alone.
    assert kept(row, SamplingParams(temperature=1, min_p=0.4, top_p=0.65)) == [0]
    assert kept(row, SamplingParams(temperature=1, top_p=0.65)) == [0, 1]
    assert kept(row, SamplingParams(temperature=1, top_k=2, top_p=0.65)) == [0]


def test_top_p_keeps_the_token_that_reaches_it():
    row = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert kept(row, SamplingParams(temperature=1, top_p=0.49)) == [0]
    assert kept(row, SamplingParams(temperature=1, top_p=0.51)) == [0, 1]
    assert kept(row, SamplingParams(temperature=1, top_p=1e-9)) == [0]


def test_ties_at_the_border_stay():
    row = [3.0, 1.0, 1.0, 1.0, 0.0]
    assert kept(row, SamplingParams(temperature=1, top_k=2)) == [0, 1, 2, 3]
    assert kept(row, SamplingParams(temperature=1, top_p=0.8)) == [0, 1, 2, 3]
    assert kept(row, SamplingParams(temperature=1, top_k=2, top_p=0.8)) == [0, 1, 2, 3]
    assert kept([1.0] * 6, SamplingParams(temperature=1, top_p=0.5)) == [0, 1, 2, 3, 4, 5]


def test_a_short_look_at_the_top_finds_the_same_nucleus(monkeypatch):
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[9, 6, 4, 2, 1, 0.1]]).T
    for top_p in (0.2, 0.9, 0.999):
        params = SamplingParams(temperature=1, top_p=top_p)
        results = []
        for looks in ((), (1,), (40, 400), (4999,)):
            monkeypatch.setattr(sampling, "_SHORT_LOOKS", looks)
            results.append(process_logits(logits, params, output_indices=range(6)))
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_do_not_depend_on_each_other(name):
    """Verification of many nodes and plain decoding of one row must agree to the bit."""
    params = toys.sampling(name, seed=5)
    logits = 2 * torch.randn(7, 3000, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([0, 1, 1, 2, 2, 2, 3])
    paths = torch.tensor([[-1, -1], [4, -1], [7, -1], [4, 4], [4, 9], [7, 2], [9, 9]])
    history = TokenHistory.from_tokens(PROMPT, [5], 3000)
    together = perturbed(logits, params, indices, history=history.extended(paths), stop_ids=STOP_IDS)
    for row in range(7):
        alone = history.with_output(paths[row][paths[row] >= 0])
        one = perturbed(logits[row : row + 1], params, indices[row : row + 1], history=alone, stop_ids=STOP_IDS)
        assert torch.equal(one[0], together[row])


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("top_k", "top_p", "min_p", "all")])
def test_a_reduced_vocabulary_sees_the_same_weights_and_noise(name):
    params, history = toys.sampling(name, seed=5), TokenHistory.from_tokens(PROMPT, [4, 5, 5], VOCAB)
    full = perturbed(TARGET, params, range(VOCAB), history=history, stop_ids=STOP_IDS)
    for ids in (REDUCED, REDUCED.flip(0), torch.tensor([1])):
        part = perturbed(TARGET[:, ids], params, range(VOCAB), token_ids=ids, history=history, stop_ids=STOP_IDS)
        # The maximum that the temperature step subtracts differs: the same weights up to a constant per row.
        shift = (full[:, ids] - part).nan_to_num(0.0)
        assert torch.equal(full[:, ids] == -INF, part == -INF)
        if params.temperature == 1:
            assert torch.equal(full[:, ids], part)
        else:
            torch.testing.assert_close(shift, shift[:, :1].expand_as(shift))


def batch_of_all():
    """Every setting, twice; greedy with and without extras; idle rows; what only looks different."""
    params = [toys.sampling(name, seed) for name in SETTINGS for seed in (5, 6)]
    params[2:2] = [None, SamplingParams(), SamplingParams(top_p=0.5, seed=3), SamplingParams(logit_bias={7: 4.0}), None]
    params += [SamplingParams(min_tokens=2), SamplingParams(presence_penalty=1.0), SamplingParams(), None]
    vocab, sequences = 3000, []
    for row, p in enumerate(params):
        output = [row, 4, 4][: row % 4]
        history = TokenHistory.from_tokens(PROMPT, output, vocab) if p and needs_history(p) else None
        sequences.append(p and Toy(p, len(output), history, STOP_IDS if row % 3 else (2, 9)))
    return sequences


def random_draft(count, kind, vocab):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(vocab, (count, 6), generator=generator)
    if kind == "chain":
        return chain(tokens)
    trees = [([-1, 0, 0, 1, 1, 3], [0, 1, 1, 2, 2, 3]), ([-1, 0, 1, 2, 2, -1], [0, 1, 2, 3, 3, 0])]
    parents, depths = (torch.tensor([trees[row % 2][part] for row in range(count)]) for part in (0, 1))
    return Draft(tokens, parents, depths)


def only(draft, row, nodes=slice(None)):
    return Draft(*(x if x is None else x[row : row + 1, nodes] for x in (draft.tokens, draft.parents, draft.depths)))


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_chooses_as_each_sequence_alone(kind, dtype):
    sequences = batch_of_all()
    draft = random_draft(len(sequences), kind, 3000)
    logits = (2 * torch.randn(len(sequences), 6, 3000, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[3, 2, 7], logits[10, 1, 2999], logits[20, 4] = math.nan, INF, -INF
    before = logits.clone()
    together = choose(logits, rows_of(sequences), draft)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    bad = [(int(row), int(node)) for row, node in (~together.finite).nonzero()]
    assert bad == [(3, 2), (10, 1), (20, 4)]
    for row, sequence in enumerate(sequences):
        if sequence is None:
            continue
        alone = choose(logits[row : row + 1], rows_of([sequence]), only(draft, row))
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.finite[0], together.finite[row])
        assert torch.equal(together.tokens[row] == -1, ~together.finite[row])
    # and a chain node by node, as plain decoding has it
    if kind == "chain":
        for row in (0, 9, 21):
            for node in range(6):
                s = sequences[row]
                path = draft.tokens[row, 1 : node + 1].tolist()
                history = s.history and s.history.with_output(path)
                step = rows_of([Toy(s.sampling, s.output_index + node, history, s.stop_ids)])
                plain = choose(logits[row : row + 1, node : node + 1], step, chain(draft.tokens[row : row + 1, :1]))
                assert torch.equal(plain.tokens[0, 0], together.tokens[row, node])


@pytest.mark.parametrize("token_ids", [None, torch.arange(2999, -1, -3)])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_mixed_batch_drafts_as_each_sequence_alone(token_ids, depth):
    sequences = batch_of_all()
    generator = torch.Generator().manual_seed(1)
    width = 3000 if token_ids is None else len(token_ids)
    logits = 2 * torch.randn(len(sequences), 4, width, generator=generator)
    paths = torch.randint(12, (len(sequences), 4, depth), generator=generator)
    before = logits.clone()
    together = draft_scores(logits, rows_of(sequences), depth, token_ids=token_ids, paths=paths)
    assert together.shape == logits.shape and together.dtype == torch.float32
    assert torch.equal(logits, before)
    for row, s in enumerate(sequences):
        if s is None:
            continue
        one = slice(row, row + 1)
        alone = draft_scores(logits[one], rows_of([s]), depth, token_ids=token_ids, paths=paths[one])
        assert torch.equal(alone[0], together[row])
        by_hand = [
            perturbed(
                logits[row, node : node + 1],
                s.sampling,
                [s.output_index + depth],
                token_ids=token_ids,
                history=s.history and s.history.with_output(paths[row, node]),
                stop_ids=s.stop_ids,
            )
            for node in range(4)
        ]
        assert torch.equal(torch.cat(by_hand), together[row])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seeds=group.seeds", "seeds=group.seeds[:1] * len(group.seeds)"),
        ("group.indices[:, None] + depths", "group.indices[:, None] + 0 * depths"),
        ("group.indices[:, None] + depths", "0 * group.indices[:, None] + depths"),
        ("history.extended(paths[group.members][0])", "history"),
        ("paths[group.members][0]", "paths[0]"),
        ("logits[group.members], depths[group.members]", "logits[: len(group.members)], depths[group.members]"),
    ],
)
def test_the_tests_see_mixed_up_rows(monkeypatch, old, new):
    monkeypatch.setattr(sampling, "_scores", mutant(sampling._scores, old, new))
    with pytest.raises(AssertionError):
        test_a_mixed_batch_chooses_as_each_sequence_alone("chain", torch.float32)
        test_a_mixed_batch_drafts_as_each_sequence_alone(None, 2)


def test_groups():
    greedy, seeded, other = (
        SamplingParams(),
        [SamplingParams(temperature=1, seed=s) for s in (4, 5)],
        SamplingParams(temperature=2),
    )
    biased = [
        SamplingParams(logit_bias=bias, max_tokens=m) for m, bias in enumerate(({1: 2, 3: 4}, {3: 4, 1: 2}, {1: 2}), 1)
    ]
    history = TokenHistory.from_tokens([], [], 9)
    sequences = [
        Toy(seeded[0], 3),
        Toy(greedy, 1),
        None,
        Toy(SamplingParams(top_k=4, min_p=0.3, seed=9, max_tokens=3), 2),
        Toy(seeded[1], 0),
        Toy(other, 4),
        *(Toy(p) for p in biased),
        *(Toy(SamplingParams(presence_penalty=1), 1, history) for _ in range(2)),
    ]
    rows = rows_of(sequences)
    assert rows.count == 11
    members = {tuple(group.members.tolist()): group for group in rows.groups}
    assert set(members) == {(0, 4), (1, 3), (5,), (6, 7), (8,), (9,), (10,)}
    assert not any(group.everyone for group in rows.groups)
    assert members[0, 4].indices.tolist() == [3, 0] and members[0, 4].seeds == (4, 5)
    assert members[9,].history is history and members[0, 4].history is None
    assert all(group.members.dtype == group.indices.dtype == torch.int64 for group in rows.groups)
    everyone = rows_of([sequences[0], sequences[4]]).groups[0]
    assert everyone.everyone and everyone.members.tolist() == [0, 1]
    assert rows_of([]).groups == rows_of([None, None]).groups == ()


def test_stop_ids_part_sequences_only_while_min_tokens_reads_them():
    early, free = SamplingParams(min_tokens=3), SamplingParams()
    assert len(rows_of([Toy(early, stop_ids=(1,)), Toy(early, stop_ids=(2,)), Toy(early, stop_ids=(1,))]).groups) == 2
    assert len(rows_of([Toy(free, stop_ids=(1,)), Toy(free, stop_ids=(2,))]).groups) == 1


def test_grouping_leaves_the_settings_as_they_were():
    params = SamplingParams(temperature=1, seed=4, logit_bias={3: 1.0})
    rows_of([Toy(params)])
    assert params == SamplingParams(temperature=1, seed=4, logit_bias={3: 1.0})
    assert dataclasses.replace(params, temperature=2.0) == SamplingParams(temperature=2, seed=4, logit_bias={3: 1.0})
    assert len(rows_of([Toy(params), Toy(dataclasses.replace(params, temperature=2.0))]).groups) == 2


def test_idle_rows_may_hold_anything():
    logits = torch.full((3, 2, 5), math.nan)
    logits[1] = torch.tensor([0.0, 3.0, 1.0, 0.0, 2.0])
    for params in (SamplingParams(), SamplingParams(temperature=1, top_k=1), SamplingParams(logit_bias={0: -1.0})):
        chosen = choose(logits, rows_of([None, Toy(params), None]), chain(torch.zeros(3, 2, dtype=torch.int64)))
        assert chosen.tokens[1].tolist() == [1, 1] and chosen.finite[1].all()
        scores = draft_scores(logits, rows_of([None, Toy(params), None]), 0, paths=torch.empty(3, 2, 0))
        assert scores[1].argmax(-1).tolist() == [1, 1]
    assert choose(logits, rows_of([None] * 3), chain(torch.zeros(3, 2, dtype=torch.int64))).tokens.shape == (3, 2)


def test_a_greedy_draft_costs_nothing():
    logits = torch.randn(2, 3, 9)
    assert draft_scores(logits, rows_of([Toy(SamplingParams()), None]), 1) is logits


def test_greedy_is_the_argmax_with_ties_to_the_lowest_id():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert pick(logits, SamplingParams(), [0, 1]).tolist() == [1, 0]
    assert pick(logits.bfloat16(), SamplingParams(top_k=1, top_p=0.1), [0, 1]).tolist() == [1, 0]
    assert pick(logits, SamplingParams(logit_bias={3: 0.5}), [0, 1]).tolist() == [1, 3]


def test_greedy_minds_bias_penalties_and_min_tokens():
    row = torch.tensor([[3.0, 2.0, 1.0]])
    assert pick(row, SamplingParams(logit_bias={2: 5}), [0]).tolist() == [2]
    history = TokenHistory.from_tokens([], [0], 3)
    assert pick(row, SamplingParams(presence_penalty=1.5), [1], history=history).tolist() == [1]
    rows = row.expand(4, -1)
    assert pick(rows, SamplingParams(min_tokens=2), [0, 1, 2, 3], stop_ids=(0, 77, -1)).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(logit_bias={0: 1.0}),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=3, min_p=0.1),
    ],
)
def test_nan_and_inf_logits_choose_nothing_in_their_row_alone(bad, params):
    logits = torch.zeros(3, 5)
    logits[1, 4] = bad
    chosen = choice(logits, params, [20, 21, 22])
    assert chosen.tokens.dtype == torch.int64 and chosen.finite.dtype == torch.bool
    assert chosen.finite[:, 0].tolist() == [True, False, True]
    assert (chosen.tokens[:, 0] == -1).tolist() == [False, True, False]


def test_bad_logits_do_not_hide_behind_a_mask():
    chosen = choice(torch.tensor([[0.0, math.nan]]), SamplingParams(min_tokens=1), [0], stop_ids=(1,))
    assert (chosen.tokens.item(), chosen.finite.item()) == (-1, False)


def test_rows_of_minus_inf_choose_nothing_and_all_but_one_do():
    logits = torch.full((1, 5), -INF)
    for params in (SamplingParams(), SamplingParams(temperature=1)):
        chosen = choice(logits, params, [0])
        assert (chosen.tokens.item(), chosen.finite.item()) == (-1, False)
    logits[0, 3] = -7
    for params in (SamplingParams(), *(SamplingParams(temperature=t, top_p=0.5, min_p=0.1) for t in (0.01, 1, 9))):
        assert pick(logits, params, [0]).tolist() == [3]


def test_settings_that_rule_out_everything_leave_nothing_of_good_logits():
    for chosen in (
        choice(torch.zeros(1, 1), SamplingParams(min_tokens=1, temperature=1), [0], stop_ids=(0,)),
        choice(torch.zeros(1, 2), SamplingParams(logit_bias={0: -INF, 1: -INF}), [0]),
        choice(torch.zeros(1, 2), SamplingParams(logit_bias={0: INF}), [0]),
    ):
        assert (chosen.tokens.item(), chosen.finite.item()) == (-1, True)


def test_errors_say_whose_fault_it_is():
    broken, ruled_out = no_choice(False, 21), no_choice(True, 7)
    assert isinstance(broken, NonFiniteLogitsError) and "output token 21 contain NaN or inf" in str(broken)
    assert "-inf" in str(broken) and "float32" in str(broken)
    assert isinstance(ruled_out, RequestError) and "output token 7" in str(ruled_out)


@pytest.mark.parametrize("token", [-1, 4])
def test_bias_outside_the_vocabulary(token):
    params = SamplingParams(logit_bias={3: 1.0, token: 1.0})
    with pytest.raises(RequestError, match=f"token {token},"):
        check_bias(params, 4)
    assert process([0.0] * 4, params).tolist() == [0, 0, 0, 1]  # a batch does not fail for one of its sequences
    for fine in (SamplingParams(), SamplingParams(logit_bias={0: 1.0, 3: -INF})):
        check_bias(fine, 4)


def test_penalties_need_a_history():
    for params in (SamplingParams(repetition_penalty=1.1), SamplingParams(presence_penalty=1)):
        assert needs_history(params)
        with pytest.raises(ValueError, match="TokenHistory"):
            process([0.0], params)
    assert not needs_history(SamplingParams(temperature=1, top_k=3, logit_bias={1: 1.0}, min_tokens=3))


def test_a_vocabulary_of_one_and_cuts_beyond_it():
    for params in (SamplingParams(), SamplingParams(temperature=1, top_k=50, top_p=0.5, min_p=0.5)):
        assert pick(torch.tensor([[-3.0]]), params, [0]).tolist() == [0]
    assert kept([1.0, 2.0, 3.0], SamplingParams(temperature=1, top_k=3)) == [0, 1, 2]
    assert kept([1.0, 2.0, 3.0], SamplingParams(temperature=1, top_k=1000, top_p=0.9999)) == [0, 1, 2]


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-6, 1e30])
def test_extreme_temperatures(temperature):
    tokens = pick(TARGET.repeat(50, 1), SamplingParams(temperature=temperature, seed=1), range(50 * VOCAB))
    if temperature < 1:
        assert torch.equal(tokens, TARGET.argmax(-1).repeat(50))
    else:
        assert len(tokens.unique()) == VOCAB


def test_no_rows():
    for params in (SamplingParams(), SamplingParams(temperature=0.5, top_k=2, top_p=0.5)):
        assert perturbed(torch.empty(0, 4), params, []).shape == (0, 4)
        assert pick(torch.empty(0, 4), params, []).shape == (0,)


def test_history():
    history = TokenHistory.from_tokens([1, 1, 3], [0, 2, 2], 5)
    assert history.prompt_mask.tolist() == [False, True, False, True, False]
    assert history.output_counts.tolist() == [1, 0, 2, 0, 0]
    longer = history.with_output([2, 4, 4])
    assert longer.output_counts.tolist() == [1, 0, 3, 0, 2]
    assert history.output_counts.tolist() == [1, 0, 2, 0, 0]
    nodes = history.extended(torch.tensor([[-1, -1], [0, -1], [0, 0], [3, 2]]))
    assert nodes.output_counts.tolist() == [[1, 0, 2, 0, 0], [2, 0, 2, 0, 0], [3, 0, 2, 0, 0], [1, 0, 3, 1, 0]]
    assert history.extended(torch.empty(1, 0, dtype=torch.int64)).output_counts.tolist() == [[1, 0, 2, 0, 0]]
    assert TokenHistory.from_tokens([], [], 2).output_counts.tolist() == [0, 0]


def test_logprobs_are_the_raw_ones():
    logits = markov(9)[:3].bfloat16()
    expected = logits.float().log_softmax(-1)
    report = logprobs(logits, torch.tensor([5, 0, 1]), 3)
    for row, (token, (own, top)) in enumerate(zip([5, 0, 1], report, strict=True)):
        assert own == expected[row, token].item()
        order = sorted(range(VOCAB), key=lambda i: -expected[row, i])[:3]
        assert [i for i, _ in top] == order
        assert [value for _, value in top] == [expected[row, i].item() for i in order]
    assert logprobs(logits, torch.tensor([5, 0, 1]), 0)[0][1] == []
    assert len(logprobs(logits, torch.tensor([5, 0, 1]), 20)[0][1]) == VOCAB
