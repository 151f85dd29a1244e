import math

import pytest
import torch
from speculation import toys
from speculation.toys import FITS, MISSES, PROMPT, REDUCED, SETTINGS, STOP_IDS, TARGET, VOCAB, fit, markov, reference
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas.core import NonFiniteLogitsError, RequestError, SamplingParams
from eyas.speculation import sampling
from eyas.speculation.sampling import TokenHistory, choose, logprobs, needs_history, perturbed, process_logits

INF = math.inf
DRAWS = 20_000


def process(row, params, index=0, **more):
    return process_logits(torch.as_tensor(row, dtype=torch.float32)[None], params, output_indices=[index], **more)[0]


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
    history = TokenHistory.from_tokens(PROMPT, output, VOCAB)
    tokens = choose(TARGET[1].expand(DRAWS, -1), params, torch.arange(DRAWS) + 3, history=history, stop_ids=STOP_IDS)
    assert fit(tokens.bincount(minlength=VOCAB).tolist(), reference(TARGET[1].tolist(), params, output)) > FITS


def test_the_test_sees_a_wrong_distribution():
    tokens = choose(TARGET[1].expand(DRAWS, -1), toys.sampling("plain"), torch.arange(DRAWS))
    counts = tokens.bincount(minlength=VOCAB).tolist()
    assert fit(counts, reference(TARGET[1].tolist(), toys.sampling("plain"))) > FITS
    for name in ("cold", "hot", "top_k", "top_p", "min_p", "bias", "repetition", "min_tokens"):
        assert fit(counts, reference(TARGET[1].tolist(), toys.sampling(name))) < MISSES, name


def test_choices_follow_over_seeds():
    counts = [0] * VOCAB
    for seed in range(3000):
        counts[int(choose(TARGET[:1], SamplingParams(temperature=1, seed=seed), [0]))] += 1
    assert fit(counts, TARGET[0].softmax(-1).tolist()) > FITS


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
        chosen = choose(TARGET[:3, ids], toys.sampling("plain", seed=5), range(3), token_ids=ids, history=history)
        assert set(chosen.tolist()) <= set(ids.tolist())


def test_greedy_is_the_argmax_with_ties_to_the_lowest_id():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert choose(logits, SamplingParams(), [0, 1]).tolist() == [1, 0]
    assert choose(logits.bfloat16(), SamplingParams(top_k=1, top_p=0.1), [0, 1]).tolist() == [1, 0]


def test_greedy_minds_bias_penalties_and_min_tokens():
    row = torch.tensor([[3.0, 2.0, 1.0]])
    assert choose(row, SamplingParams(logit_bias={2: 5}), [0]).tolist() == [2]
    history = TokenHistory.from_tokens([], [0], 3)
    assert choose(row, SamplingParams(presence_penalty=1.5), [1], history=history).tolist() == [1]
    rows = row.expand(4, -1)
    assert choose(rows, SamplingParams(min_tokens=2), [0, 1, 2, 3], stop_ids=[0, 77, -1]).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, top_k=3, min_p=0.1)])
def test_nan_and_inf_logits_are_an_error_that_names_the_row(bad, params):
    logits = torch.zeros(3, 5)
    logits[1, 4] = bad
    with pytest.raises(NonFiniteLogitsError, match="output token 21 contain NaN or inf"):
        choose(logits, params, [20, 21, 22])


def test_bad_logits_do_not_hide_behind_a_mask():
    logits = torch.tensor([[0.0, math.nan]])
    with pytest.raises(NonFiniteLogitsError):
        choose(logits, SamplingParams(min_tokens=1), [0], stop_ids=[1])


def test_rows_of_minus_inf_are_an_error_and_all_but_one_is_not():
    logits = torch.full((1, 5), -INF)
    with pytest.raises(NonFiniteLogitsError, match="-inf"):
        choose(logits, SamplingParams(), [0])
    logits[0, 3] = -7
    for params in (SamplingParams(), *(SamplingParams(temperature=t, top_p=0.5, min_p=0.1) for t in (0.01, 1, 9))):
        assert choose(logits, params, [0]).tolist() == [3]


def test_settings_that_rule_out_everything_are_the_requests_fault():
    with pytest.raises(RequestError, match="output token 0"):
        choose(torch.zeros(1, 1), SamplingParams(min_tokens=1, temperature=1), [0], stop_ids=[0])
    with pytest.raises(RequestError):
        choose(torch.zeros(1, 2), SamplingParams(logit_bias={0: -INF, 1: -INF}), [0])


@pytest.mark.parametrize("token", [-1, 4])
def test_bias_outside_the_vocabulary(token):
    with pytest.raises(RequestError, match=f"token {token}"):
        process([0.0] * 4, SamplingParams(logit_bias={token: 1.0}))


def test_penalties_need_a_history():
    for params in (SamplingParams(repetition_penalty=1.1), SamplingParams(presence_penalty=1)):
        assert needs_history(params)
        with pytest.raises(ValueError, match="TokenHistory"):
            process([0.0], params)
    assert not needs_history(SamplingParams(temperature=1, top_k=3, logit_bias={1: 1.0}, min_tokens=3))


def test_a_vocabulary_of_one_and_cuts_beyond_it():
    for params in (SamplingParams(), SamplingParams(temperature=1, top_k=50, top_p=0.5, min_p=0.5)):
        assert choose(torch.tensor([[-3.0]]), params, [0]).tolist() == [0]
    assert kept([1.0, 2.0, 3.0], SamplingParams(temperature=1, top_k=3)) == [0, 1, 2]
    assert kept([1.0, 2.0, 3.0], SamplingParams(temperature=1, top_k=1000, top_p=0.9999)) == [0, 1, 2]


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-6, 1e30])
def test_extreme_temperatures(temperature):
    tokens = choose(TARGET.repeat(50, 1), SamplingParams(temperature=temperature, seed=1), range(50 * VOCAB))
    if temperature < 1:
        assert torch.equal(tokens, TARGET.argmax(-1).repeat(50))
    else:
        assert len(tokens.unique()) == VOCAB


def test_no_rows():
    for params in (SamplingParams(), SamplingParams(temperature=0.5, top_k=2, top_p=0.5)):
        assert choose(torch.empty(0, 4), params, []).shape == (0,)


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
