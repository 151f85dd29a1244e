"""``eyas run --compare``: the same tokens or not, how much faster, and the exit code that says so."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest
import torch

from eyas.cli import run as run_module
from eyas.cli.prompts import DEMO
from eyas.core import Acceptance
from eyas.engine.lossless import Comparer, Divergence
from eyas.speculation.verify import accept

ASK = ("w5 w9 w77", "--compare", "--drafter", "untrained", "--max-tokens", "12")


@pytest.fixture(autouse=True)
def once(monkeypatch):
    """Comparing three times is for two tests below."""
    monkeypatch.setattr(run_module, "SPARE_SECONDS", 0)


def accept_anything(draft, chosen):
    """A planted bug: the first draft token is taken whatever the target says."""
    if draft.tokens.shape[1] == 1:
        return accept(draft, chosen)
    path = torch.tensor([[0, 1]]).expand(len(chosen), -1)
    return Acceptance(path.sum(1) + 1, path, torch.stack((draft.tokens[:, 1], chosen[:, 1]), dim=1))


def test_side_by_side(eyas, target):
    ran = eyas("run", target, *ASK)
    assert ran.code == 0, ran.err
    for words in ("without speculation", "with speculation", "tokens/s", "acceptance length", "the same 12 tokens"):
        assert words in ran.out
    assert "in total" not in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_the_built_in_prompts_with_a_stand_in(eyas, target):
    ran = eyas("run", target, "--compare", "--max-tokens", 5)
    assert ran.code == 0, ran.err
    assert "note: no trained drafter is there yet" in ran.err and "not how fast it gets" in ran.err
    for number, text in enumerate(DEMO, start=1):
        assert f"[{number}] {text[:40]}" in ran.out
    assert "in total" in ran.out and ran.out.count("the same 5 tokens") == len(DEMO)
    assert max(map(len, ran.out.splitlines())) <= 80


def test_json(eyas, target):
    ran = eyas("run", target, *ASK, "--json")
    (found,) = ran.records
    assert found["equal"] and found["lossless"] and found["divergences"] == [] and found["speedup"] > 0
    assert found["token_ids"] == found["plain"]["token_ids"] and found["text"] == found["plain"]["text"]
    assert found["steps"] > 0 and found["plain"]["steps"] == 0
    several = eyas("run", target, "--compare", "--max-tokens", 3, "--json").records
    assert [line["prompt"] for line in several] == list(DEMO)


def test_a_difference_in_fp32_is_a_bug_and_fails(eyas, target, monkeypatch):
    monkeypatch.setattr("eyas.engine.engine.accept", accept_anything)
    ran = eyas("run", target, *ASK)
    assert ran.code == 1
    assert "the tokens DIFFER, and rounding does not explain it" in ran.out and "  token 2: 'w" in ran.out
    (found,) = (other := eyas("run", target, *ASK, "--json")).records
    assert other.code == 1 and not found["equal"] and not found["lossless"]
    assert not found["divergences"][0]["near_tie"] and found["divergences"][0]["index"] == 1


def test_a_near_tie_is_reported_and_passes(eyas, target, monkeypatch):
    tie = Divergence(2, (7, 9), 0.001, 0.25, True)
    compare = Comparer.compare

    def tied(self, *args, **kwargs):
        found = compare(self, *args, **kwargs)
        object.__setattr__(found, "divergences", (tie,))
        return found

    monkeypatch.setattr(Comparer, "compare", tied)
    ran = eyas("run", target, *ASK)
    assert ran.code == 0
    assert "the same tokens but for 1 near-tie of rounding" in ran.out
    assert "token 3: 'w7' or 'w9', in fp32 0.001 apart; float32 is off by up to 0.25" in " ".join(ran.out.split())
    assert "with plain decoding's token put there" in ran.out
    several = eyas("run", target, "--compare", "--max-tokens", 3).out
    assert several.count(" 1 near-tie ") == 2 * len(DEMO) and several.count(" 4 near-ties ") == 1
    (found,) = eyas("run", target, *ASK, "--json").records
    assert not found["equal"] and found["lossless"]
    assert found["divergences"] == [{"index": 2, "tokens": [7, 9], "gap": 0.001, "error": 0.25, "near_tie": True}]


def test_an_infinite_gap_is_still_json(eyas, target, monkeypatch):
    monkeypatch.setattr(Comparer, "judge", lambda *_: Divergence(1, (7, -1), float("inf"), 0.0, False))
    monkeypatch.setattr("eyas.engine.engine.accept", accept_anything)
    (found,) = eyas("run", target, *ASK, "--json").records
    assert found["divergences"][0]["gap"] is None
    assert "or the end, in fp32 inf apart" in " ".join(eyas("run", target, *ASK).out.split())


@pytest.fixture
def calls(monkeypatch):
    """What is compared: how many tokens, and whether with speculation first."""
    calls = []
    compare = Comparer.compare

    def spy(self, prompt, sampling, **kwargs):
        calls.append((sampling.max_tokens, kwargs.get("speculative_first")))
        return compare(self, prompt, sampling, **kwargs)

    monkeypatch.setattr(Comparer, "compare", spy)
    return calls


@pytest.mark.parametrize(("spare", "firsts"), [(0, "PSPS"), (1000, "PSP SPS PSP SPS")])
def test_each_way_is_first_in_turn_after_a_warm_up(eyas, target, monkeypatch, calls, spare, firsts):
    monkeypatch.setattr(run_module, "SPARE_SECONDS", spare)
    ran = eyas("run", target, "--compare", "--max-tokens", 10)
    assert ran.code == 0
    assert calls[0] == (min(10, run_module.WARM_UP_TOKENS), None)
    assert calls[1:] == [(10, first == "S") for first in firsts.replace(" ", "")]
    assert ran.out.count("the same 10 tokens") == len(DEMO), "each prompt is shown once"


def test_signs_of_life_where_there_is_no_terminal(eyas, target):
    ran = eyas("run", target, "--compare", "--max-tokens", 3, "--drafter", "untrained", "--json")
    expected = [f"prompt {number} of {len(DEMO)}, with and without speculation ..." for number in range(1, 5)]
    assert ran.err.splitlines() == [f"loading {target} ...", "warming up ...", *expected]
    assert len(ran.records) == len(DEMO)


@dataclass
class Round:
    speedup: float
    lossless: bool = True


@pytest.mark.parametrize("order", list(itertools.permutations((1.1, 1.2, 9.0))), ids=str)
def test_the_median_of_three_is_shown(order):
    rounds = iter(map(Round, order))
    assert run_module.compare_often(lambda speculative_first: next(rounds), True, spare=1000).speedup == 1.2


@pytest.mark.parametrize("wrong", range(3))
def test_a_difference_is_not_lost_among_the_others(wrong):
    rounds = iter(Round(1 + number, lossless=number != wrong) for number in range(3))
    found = run_module.compare_often(lambda speculative_first: next(rounds), False, spare=1000)
    assert not found.lossless and found.speedup == 1 + wrong
    assert len(list(rounds)) == (2 if wrong == 0 else 0)


def test_what_takes_long_is_compared_once():
    rounds = iter(map(Round, (3.0, 1.0, 1.0)))

    def once(speculative_first):
        time.sleep(0.02)
        return next(rounds)

    assert run_module.compare_often(once, True, spare=0.039).speedup == 3 and len(list(rounds)) == 2


def test_lower_precision(eyas, target):
    ran = eyas("run", target, *ASK, "--dtype", "bfloat16", "--json")
    (found,) = ran.records
    assert ran.code == 0 and found["lossless"]


@pytest.mark.real
def test_a_real_model(eyas):
    asked = (
        "run",
        "smollm2",
        "Why do falcons dive?",
        "--compare",
        "--drafter",
        "untrained",
        "--max-tokens",
        16,
        "--json",
    )
    ran = eyas(*asked)
    (found,) = ran.records
    assert ran.code == 0 and found["lossless"] and found["steps"] > 0
    assert "falcon" in found["text"].lower()


def test_sampled_and_raw(eyas, target):
    (found,) = eyas("run", target, *ASK, "--temperature", 1, "--top-k", 20, "--raw", "--json").records
    assert found["equal"] and found["prompt_tokens"] == 3
