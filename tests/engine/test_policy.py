"""The policy in a made-up world: what a step costs there and how good the drafter is are known, so regret is too."""

import math
import random
from collections import Counter
from itertools import pairwise

import pytest

from eyas.core import DraftShape
from eyas.engine.policy import (
    Auto,
    BatchView,
    Decision,
    Evidence,
    Fixed,
    Off,
    StepReport,
    describe,
    ladder,
    limited,
)
from eyas.engine.stats import AcceptanceStats
from eyas.speculation.cost import AcceptanceRates, CostModel, expected_tokens

CHAINS = ladder(DraftShape(5, 1, 6))
TREES = ladder(DraftShape(4, 3, 12))
GOOD, WEAK, USELESS = (0.75, 0.7, 0.65, 0.6, 0.5), (0.3,) * 5, (0.0,) * 5


class World:
    """Costs like those of SmolLM2 on two cores, with noise, hiccups and drift; acceptance by depth."""

    def __init__(self, first=USELESS, *, seed=0, noise=0.08, hiccups=0.01, drift=0.0, draft=1.0):
        self.first, self.noise, self.hiccups, self.drift, self.draft = first, noise, hiccups, drift, draft
        self.dice = random.Random(seed)
        self.clock = self.paid = self.ideal = 0.0  # seconds with noise, without it, and those of the best fixed choice
        self.steps = []  # (shape, explores)

    def forward(self, B, T, S):
        return 0.016 + 0.0004 * B * T + 1e-8 * B * S

    def propose(self, B, shape):
        return self.draft * (0.001 + shape.num_steps * (0.0016 + 0.00005 * B * shape.eagle_topk)) if shape else 0.0

    def cost(self, shape, B, S):
        T = shape.num_draft_tokens if shape else 1
        return self.forward(B, T, S) + self.propose(B, shape) + 0.0003

    def rates(self, shape):
        """By depth: a tree's children together."""
        rates = AcceptanceRates.from_first(self.first, shape.eagle_topk)
        if shape.eagle_topk == 1:
            return list(self.first[: shape.num_steps])
        tokens = [expected_tokens(limited(shape, steps), rates) - 1 for steps in range(1, shape.num_steps + 1)]
        reach = [1.0, *(after - before for before, after in zip([0.0, *tokens], tokens, strict=False))]
        return [min(b / a, 1.0) if a else 0.0 for a, b in pairwise(reach)]

    def tokens(self, shape):
        return 1 + sum(math.prod(self.rates(shape)[: i + 1]) for i in range(shape.num_steps)) if shape else 1.0

    def noisy(self, seconds):
        machine = math.exp(self.drift * math.sin(self.clock / 20))
        hiccup = self.dice.choice((2, 5, 20)) if self.dice.random() < self.hiccups else 1
        return seconds * machine * hiccup * self.dice.lognormvariate(0, self.noise)

    def run(self, policy, B, steps, *, S=512, drafted=None, room=1000, shapes=CHAINS):
        drafted = B if drafted is None else drafted
        least = min(self.cost(s, B, S) / (B + drafted * (self.tokens(s) - 1)) for s in (None, *shapes))
        begun = len(self.steps)
        for _ in range(steps):
            decision = policy.decide(BatchView(sequences=B, bucket=B, length=S, drafted=drafted, room=room))
            shape = decision.shape
            depth, T = (shape.num_steps, shape.num_draft_tokens) if shape else (0, 1)
            reached, accepted = [0] * depth, [0] * depth
            for _ in range(drafted):
                for position, rate in enumerate(self.rates(shape) if shape else ()):
                    reached[position] += 1
                    if self.dice.random() >= rate:
                        break
                    accepted[position] += 1
            emitted = B + sum(accepted)
            seconds = [self.noisy(s) for s in (self.propose(B, shape), self.forward(B, T, S), 0.0003)]
            policy.observe(StepReport(decision, B, T, S, *seconds, depth, reached, accepted, emitted))
            self.clock += sum(seconds)
            self.paid += self.cost(shape, B, S)
            self.ideal += emitted * least
            self.steps.append((shape, decision.explores))
        return self.steps[begun:]

    @property
    def regret(self):
        return self.paid / self.ideal


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("B", [1, 4, 16, 32])
def test_a_useless_drafter_costs_next_to_nothing(B):
    worlds, policies = [World(seed=seed) for seed in range(5)], [Auto(CHAINS) for _ in range(5)]
    for world, policy in zip(worlds, policies, strict=True):
        first = world.run(policy, B, 128)
        assert sum(shape is not None for shape, _ in first) <= 14
    assert mean(world.regret for world in worlds) <= 1.02  # one answer of 128 tokens, the start included
    for world, policy in zip(worlds, policies, strict=True):
        world.run(policy, B, 1500)
        assert world.regret <= 1.01
        assert policy.statistics().exploration <= 0.025  # a hiccup may come while it explores
        assert policy.statistics().choice == "plain"


@pytest.mark.parametrize("first", [WEAK, GOOD])
@pytest.mark.parametrize("B", [1, 4, 16, 32])
def test_it_comes_close_to_the_best_choice(first, B):
    worlds = [World(first, seed=seed) for seed in range(4)]
    for world in worlds:
        world.run(Auto(CHAINS), B, 800)
    assert mean(world.regret for world in worlds) <= 1.05


def test_trees_are_among_the_choices():
    world = World((0.5, 0.5, 0.5, 0.5), noise=0.04, hiccups=0)
    policy = Auto(TREES)
    steps = world.run(policy, 1, 2500, shapes=TREES)
    assert any(shape and shape.eagle_topk > 1 for shape, explores in steps[1000:] if not explores)
    assert world.regret <= 1.08


@pytest.mark.parametrize("first", [USELESS, GOOD])
@pytest.mark.parametrize("B", [1, 16])
def test_a_machine_that_doubles_its_speed_and_halves_it_again(first, B):
    worlds = [World(first, seed=seed, drift=0.35) for seed in range(3)]
    for world in worlds:
        world.run(Auto(CHAINS), B, 2000)
    assert mean(world.regret for world in worlds) <= (1.04 if any(first) else 1.01)


def test_every_batch_size_gets_its_own_choice():
    world, policy, choices = World(GOOD), Auto(CHAINS), {}
    for _ in range(8):
        for B in (1, 32, 4):
            choices[B] = Counter(shape.num_steps if shape else 0 for shape, _ in world.run(policy, B, 60))
    assert world.regret <= 1.05
    assert choices[1].most_common(1)[0][0] > choices[32].most_common(1)[0][0]


def test_a_drafter_that_becomes_good_is_found_again_and_one_that_becomes_useless_is_dropped():
    for seed in range(3):
        world, policy = World(USELESS, seed=seed), Auto(CHAINS)
        world.run(policy, 1, 1200)
        world.first = GOOD
        world.run(policy, 1, 1200)
        steps = world.run(policy, 1, 200)
        assert mean(shape is not None for shape, _ in steps) > 0.9
        world.first = USELESS
        steps = world.run(policy, 1, 400)
        assert sum(shape is not None for shape, _ in steps) < 100
        assert policy.statistics().exploration <= 0.025


def test_costs_that_change_under_a_good_drafter():
    """A drafter ten times as expensive (it was swapped, its kernels fell back): plain decoding wins."""
    world, policy = World(GOOD), Auto(CHAINS)
    world.run(policy, 1, 400)
    world.draft = 10.0
    steps = world.run(policy, 1, 400)
    assert mean(shape is None for shape, _ in steps[50:]) > 0.9


@pytest.mark.parametrize("first", [USELESS, WEAK, GOOD])
@pytest.mark.parametrize("B", [1, 8])
def test_exploration_takes_at_most_two_percent_of_the_time(first, B):
    world, policy = World(first, hiccups=0), Auto(CHAINS)
    world.run(policy, B, 2000)
    explored = policy.statistics().exploration
    assert 0 < explored <= 0.02
    assert explored == pytest.approx(mean(explores for _, explores in world.steps), abs=0.02)
    rare = [i for i, (shape, explores) in enumerate(world.steps) if explores and (shape is None) == any(first)]
    assert all(b - a == 1 or b - a >= 40 for a, b in pairwise(rare))


def test_without_a_drafted_sequence_and_without_room_it_is_plain():
    world, policy = World(GOOD), Auto(CHAINS)
    assert {shape for shape, _ in world.run(policy, 4, 50, drafted=0)} == {None}
    world.run(policy, 4, 100)
    assert {shape for shape, _ in world.run(policy, 4, 20, room=1)} == {None}
    assert {shape.num_steps for shape, _ in world.run(policy, 4, 20, room=2) if shape} == {1}
    assert policy.follow()


def test_few_who_can_be_drafted_for_do_not_make_all_pay():
    """One of sixteen: a draft costs all and brings little. But new prompts are to be followed, so that it will."""
    world, policy = World(GOOD), Auto(CHAINS)
    world.run(policy, 16, 300)
    steps = world.run(policy, 16, 200, drafted=1)
    assert mean(shape is None for shape, _ in steps) > 0.9
    assert policy.follow() and policy.decide(BatchView(16, 16, 512, 1, 100)).follow
    assert mean(shape is not None for shape, _ in world.run(policy, 16, 50)) > 0.9


def test_new_prompts_are_fed_to_a_losing_drafter_only_now_and_then_and_that_is_enough():
    world, policy = World(USELESS), Auto(CHAINS)
    assert policy.follow()  # it might be good
    world.run(policy, 1, 200)
    assert not policy.decide(BatchView(1, 1, 512, 1, 100)).follow
    followed = 0
    for _ in range(100):  # answers of 32 tokens; where the drafter was not fed nothing can be drafted
        follows = policy.follow()
        followed += follows
        world.run(policy, 1, 32, drafted=int(follows))
    assert 1 <= followed <= 100 / 8 + 1
    world.first, found = GOOD, False
    for _ in range(60):
        follows = policy.follow()
        found = mean(shape is not None for shape, _ in world.run(policy, 1, 32, drafted=int(follows))) > 0.8
    assert found


def test_the_same_observations_lead_to_the_same_decisions():
    runs = []
    for _ in range(2):
        random.seed(len(runs))  # nobody's business
        runs.append(World(GOOD, seed=5).run(Auto(CHAINS), 2, 500))
    assert runs[0] == runs[1]


def test_known_costs_are_used_from_the_first_step():
    world, costs = World(GOOD), CostModel()
    for _ in range(3):
        for steps in (None, 1, 3, 5):
            shape = DraftShape(steps, 1, steps + 1) if steps else None
            T = steps + 1 if steps else 1
            costs.record("forward", 1, T, 512, world.forward(1, T, 512))
            if shape:
                costs.record("propose", 1, steps, 512, world.propose(1, shape))
    decision = Auto(CHAINS, costs).decide(BatchView(1, 1, 512, 1, 100))
    assert decision.shape is not None and not decision.explores
    assert "tokens/step at" in decision.reason and "x plain" in decision.reason


def test_off_and_fixed():
    view, tree = BatchView(sequences=2, bucket=2, length=64, drafted=2, room=50), DraftShape(4, 3, 12)
    off, fixed = Off(), Fixed(tree)
    assert off.decide(view).shape is None and not off.follow() and not off.decide(view).follow
    assert fixed.decide(view).shape == tree and fixed.follow()
    assert fixed.decide(BatchView(2, 2, 64, 0, 50)).shape is None
    assert fixed.decide(BatchView(2, 2, 64, 2, 2)).shape == DraftShape(1, 3, 4)
    assert fixed.decide(BatchView(2, 2, 64, 2, 1)).shape is None
    world = World(GOOD)
    world.run(fixed, 2, 30)
    statistics = fixed.statistics()
    assert statistics.shares == {describe(tree): 1.0} and statistics.exploration == 0 and statistics.steps == 30
    assert off.statistics().shares == {} and off.statistics().choice == ""


def test_statistics_say_what_was_done_and_why():
    world, policy = World(GOOD, hiccups=0), Auto(CHAINS)
    assert policy.statistics().steps == 0
    world.run(policy, 1, 500)
    found = policy.statistics()
    assert found.steps == 500 and sum(found.shares.values()) == pytest.approx(1)
    counts = Counter(describe(shape) for shape, _ in world.steps)
    assert found.shares == {choice: count / 500 for choice, count in counts.items()}
    assert found.reason.startswith(f"{found.choice}: ")
    assert set(found.predicted) == {"plain", *(f"chain of {n}" for n in range(1, 6))}
    assert found.measured["plain"] == pytest.approx(1 / world.cost(None, 1, 512), rel=0.1)
    favourite = max(found.shares, key=found.shares.get)
    assert found.predicted[favourite] == pytest.approx(found.measured[favourite], rel=0.15)


def test_evidence_learns_rates_by_depth_and_starts_with_hope():
    evidence, dice, chain = Evidence(), random.Random(1), DraftShape(3, 1, 4)
    assert [row[0] for row in evidence.rates(3, 1).by_rank] == [0.6] * 3
    for _ in range(600):
        hits = 0
        while hits < 3 and dice.random() < (0.8, 0.5, 0.9)[hits]:
            hits += 1
        reached = [int(hits >= i) for i in range(3)]
        evidence.observe(chain, reached, [int(hits > i) for i in range(3)])
    rates = [row[0] for row in evidence.rates(5, 1).by_rank]
    assert rates[:3] == pytest.approx([0.8, 0.5, 0.9], abs=0.08)
    assert rates[3] == rates[4] == rates[2]  # never tried: like the deepest one that was
    for _ in range(25):
        evidence.observe(chain, [1, 0, 0], [0, 0, 0])
    assert evidence.rates(1, 1).by_rank[0][0] < 0.3  # a break is believed at once, not after hundreds of drafts
    evidence.observe(chain, [], [])
    evidence.observe(chain, [0, 0, 0], [0, 0, 0])


def test_evidence_of_trees_scales_trees():
    evidence, tree = Evidence(), DraftShape(2, 2, 5)
    before = expected_tokens(tree, evidence.rates(2, 2))
    for _ in range(300):
        evidence.observe(tree, [1, 0], [0, 0])
    assert expected_tokens(tree, evidence.rates(2, 2)) < 1.1 < before
    for _ in range(100_000):
        evidence.observe(tree, [4, 0], [0, 0])  # nothing underflows into a division by zero
    assert expected_tokens(tree, evidence.rates(2, 2)) == pytest.approx(1.0, abs=0.01)


def test_ladder():
    assert [shape.num_steps for shape in ladder(DraftShape(3, 1, 4))] == [1, 2, 3]
    lengths = [shape.num_steps for shape in ladder(DraftShape(20, 1, 21))]
    assert lengths[:8] == list(range(1, 9)) and lengths[-1] == 20 and len(lengths) < 14
    trees = [shape for shape in ladder(DraftShape(3, 4, 24)) if shape.eagle_topk > 1]
    assert trees == [DraftShape(1, 4, 5), DraftShape(2, 4, 21), DraftShape(3, 4, 24)]


def test_acceptance_stats_count_drafts_one_by_one():
    stats = AcceptanceStats()
    stats.record(depth=3, drafted=3, hits=3, emitted=4)
    stats.record(depth=3, drafted=3, hits=1, emitted=2)
    stats.record(depth=3, drafted=3, hits=2, emitted=2)  # ended with the second hit: the third position was not judged
    stats.record(depth=3, drafted=3, hits=3, emitted=1)  # ended inside the run
    stats.record(depth=1, drafted=2, hits=0, emitted=1)
    stats.record(depth=0, drafted=0, hits=0, emitted=1)  # a plain step is none
    assert stats == AcceptanceStats(steps=5, drafted=14, emitted=10, reached=[5, 3, 1], accepted=[4, 2, 1])
    assert stats.acceptance_length == 2.0


def test_a_report_of_a_step_that_did_not_draft_after_all():
    policy = Auto(CHAINS)
    decision = Decision(DraftShape(3, 1, 4), "chain of 3: to see")
    policy.observe(StepReport(decision, 1, 1, 64, 0.0, 0.02, 0.001, 0, [], [], 1))
    assert policy.costs.step(None, 1, 64) == pytest.approx(0.021) and not policy.costs.knows("propose")
