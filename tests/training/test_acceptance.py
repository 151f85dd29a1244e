"""Acceptance as it is measured: what a drafter that errs by plan must come to, and a model in training left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from engine.harness import CHAIN, TREE, decode, engine_for, random_drafter, scripted, target_of, truth
from scripted import Script, Wrong

from eyas.core import DraftShape, EyasError, NonFiniteLogitsError, RequestError, SamplingParams, UsageError
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.engine.stats import AcceptanceStats
from eyas.target.adapter import HFTarget
from eyas.training import acceptance
from eyas.training.acceptance import answer_all, as_loaded, interval, measure_acceptance, total

NAME = "llama"
PROMPTS = [truth(NAME, length=length).prompt for length in (12, 17, 30)]


def answers(drafter, shape=CHAIN, tokens=21, **sampling):
    settings = SamplingParams(**{"max_tokens": tokens, "seed": 0, **sampling})
    return answer_all(target_of(NAME), drafter, PROMPTS, shape=shape, sampling=settings)


def planned(errs) -> object:
    lengths = (12, 17, 30)
    return scripted({str(n): truth(NAME, length=length).script for n, length in enumerate(lengths)}, errs)


@pytest.mark.parametrize(
    ("errs", "accepted", "reached", "length"),
    [
        (lambda step: 0, [4, 4, 4, 4, 4], [4, 4, 4, 4, 4], 20 / 4),  # steps of 6, 6, 6 and what is left: 2
        (lambda step: 1, [0], [20], 1.0),
        (lambda step: 3, [7, 7, 0], [7, 7, 6], 20 / 7),  # six steps of 3, and 2 of the seventh's
    ],
)
def test_a_drafter_that_errs_by_plan(errs, accepted, reached, length):
    found = answers(planned(errs))
    assert [a.output_ids for a in found] == [truth(NAME, length=n).tokens[:21] for n in (12, 17, 30)]
    stats = total(a.stats for a in found)
    assert stats.acceptance_length == pytest.approx(length)
    pad = [0] * (5 - len(accepted))
    if errs(1):  # all steps but the last one are whole
        assert stats.accepted == [3 * n for n in accepted] + pad and stats.reached == [3 * n for n in reached] + pad
    else:
        assert stats.accepted == [12, 12, 9, 9, 9] and stats.reached == [12, 12, 9, 9, 9]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_neither_company_nor_order_changes_what_is_counted(monkeypatch, shape):
    def errs(step: int) -> int:
        return (3 * step) % (shape.num_steps + 1)

    together = answers(planned(errs), shape)
    assert len(set(total(a.stats for a in together).accepted)) > 1  # or nothing is compared
    monkeypatch.setitem(acceptance.AT_ONCE, "cpu", 1)
    assert answers(planned(errs), shape) == together


def test_the_count_is_the_engines(monkeypatch):
    """Of everything but an answer's last step, where the engine itself may draft less."""
    monkeypatch.setitem(acceptance.AT_ONCE, "cpu", 1)
    (found,) = answer_all(
        target_of(NAME), random_drafter(NAME), PROMPTS[:1], shape=CHAIN, sampling=SamplingParams(max_tokens=40, seed=0)
    )
    engine = engine_for(NAME, random_drafter(NAME), CHAIN)
    theirs = decode(engine, replace(truth(NAME, length=12).request(), sampling=SamplingParams(max_tokens=40))).stats
    assert abs(found.stats.steps - theirs.steps) <= 1
    assert all(abs(a - b) <= 1 for a, b in zip(found.stats.accepted, theirs.accepted, strict=True))


def test_sampled_answers_depend_on_the_seed_alone():
    hot = {"temperature": 0.8, "seed": 5}
    found, again, others = (answers(random_drafter(NAME), **s) for s in (hot, hot, {**hot, "seed": 6}))
    assert found == again and found[0].output_ids != others[0].output_ids
    assert found[1].sampling.seed == others[0].sampling.seed == 6
    plain = answers(planned(lambda step: 1), tokens=21)  # greedy: the script is followed, so this is not it
    assert found[0].output_ids != plain[0].output_ids


def test_answers_end_where_they_end():
    expected = truth(NAME, length=12).tokens
    end = expected[7]
    found = answer_all(
        target_of(NAME),
        planned(lambda step: 0),
        PROMPTS[:1],
        shape=CHAIN,
        sampling=SamplingParams(max_tokens=30, seed=0),
        eos_ids=[end],
    )[0]
    assert found.output_ids == expected[: expected.index(end) + 1]
    assert found.stats.emitted == len(found.output_ids) - 1


# In training


def test_a_model_in_training_is_measured_as_it_will_be_loaded():
    target = HFTarget(zoo.case(NAME).build().bfloat16())
    model = random_drafter(NAME).model.train()
    model.bind(*(weight.float() for weight in target.get_embed_and_head()))
    lent, before = model.embed(torch.tensor([[3]])), {k: v.clone() for k, v in model.state_dict().items()}
    prompts = [PROMPTS[0]]
    found = measure_acceptance(target, model, prompts, steps=3, max_tokens=16)
    same = answer_all(
        target,
        Eagle3Drafter(random_drafter(NAME).model.bfloat16().eval()),
        prompts,
        shape=DraftShape(3, 1, 4),
        sampling=SamplingParams(max_tokens=16, seed=0),
    )
    assert found == same[0].stats and found.emitted == 15
    assert model.training and model.dtype == torch.float32
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(model.embed(torch.tensor([[3]])), lent)
    # and it can go on learning: nothing that was made while measuring is a tensor without gradients
    states = torch.randn(1, 4, model.config.num_aux * model.config.target_hidden_size)
    out = model(model.embed(torch.tensor([[1, 2, 3, 4]])), model.fuse(states), torch.arange(4)[None])
    model.logits(out.normed).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.dim() == 2)


def test_as_loaded_is_a_copy():
    model = random_drafter(NAME, "two layers, all norms").model
    copied = as_loaded(model, target_of(NAME))
    with torch.no_grad():
        model.norm.weight.zero_()
    assert not torch.equal(copied.norm.weight, model.norm.weight) and copied.config == model.config


# What can go wrong


def test_bad_prompts_are_named():
    target, drafter = target_of(NAME), random_drafter(NAME).model
    with pytest.raises(UsageError, match="no prompts"):
        measure_acceptance(target, drafter, [])
    with pytest.raises(RequestError, match=r"Prompt 2 of 2.*empty"):
        measure_acceptance(target, drafter, [PROMPTS[0], []])
    with pytest.raises(RequestError, match=r"Prompt 1 of 1.*outside the target's 0 to 159"):
        measure_acceptance(target, drafter, [[zoo.VOCAB]])
    with pytest.raises(RequestError, match=r"Prompt 1 of 1.*context holds 512"):
        measure_acceptance(target, drafter, [[1] * 512])


def test_a_target_that_breaks():
    model = zoo.case(NAME).build()
    target = HFTarget(model)
    with torch.no_grad():
        model.get_output_embeddings().weight[:] = torch.nan
    with pytest.raises(NonFiniteLogitsError):
        measure_acceptance(target, random_drafter(NAME).model, PROMPTS)


def test_a_drafter_that_breaks_is_not_a_weak_one(monkeypatch):
    drafter = random_drafter(NAME)
    monkeypatch.setattr(drafter, "propose", lambda *args: 1 / 0)
    with pytest.raises(EyasError, match="drafter failed while prompt 1 of 3"):
        answers(drafter)


def test_a_drafter_full_of_nan_is_one_that_is_never_right():
    model = random_drafter(NAME).model
    with torch.no_grad():
        model.fc.weight[:] = torch.nan
    found = measure_acceptance(target_of(NAME), model, PROMPTS, max_tokens=8)
    assert found.acceptance_length < 1.5 and found.emitted == 21


def test_scripts_that_are_wrong_are_noticed():
    """The drafters above check what they are fed: this is one that would notice."""
    drafter = scripted({"0": Script(truth(NAME, length=12).tokens, torch.zeros(200, 96))})
    with pytest.raises(Wrong):
        answer_all(target_of(NAME), drafter, PROMPTS[:1], shape=CHAIN, sampling=SamplingParams(max_tokens=9, seed=0))


# The interval


def stats_of(emitted: int, steps: int) -> AcceptanceStats:
    return AcceptanceStats(steps=steps, emitted=emitted)


def test_the_interval_resamples_whole_prompts():
    parts = [stats_of(20, 10)] * 30 + [stats_of(40, 10)] * 30
    low, high = interval(parts)
    # of the mean of 60 draws from {2, 4}: 3 with a standard error of 1 / sqrt(60)
    assert low == pytest.approx(3 - 1.96 / 60**0.5, abs=0.03) and high == pytest.approx(3 + 1.96 / 60**0.5, abs=0.03)
    assert interval([stats_of(20, 10)] * 5) == (2.0, 2.0)


def test_the_interval_of_nothing():
    assert interval([]) == interval([AcceptanceStats()]) == (1.0, 1.0)
