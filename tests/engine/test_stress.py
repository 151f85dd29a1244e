"""Thousands of steps with everything at once: whoever meets no fault is answered as if alone, whoever does fails alone.

One engine serves requests of all kinds that come and go at random, in memory for a few of them, with a policy that
changes its mind at every step, a target that breaks now and then, and prompts that begin alike. Nearly all requests
are some of a few dozen, whose answers are known from a plain engine that had nothing else to do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers as tf
import zoo
from engine.harness import decode, lively, plant, words
from scripted import Script, ScriptedDrafter, Wrong

from eyas.core import Draft, DraftShape, EyasError, Request, SamplingParams
from eyas.drafter.contract import Drafter
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import untrained
from eyas.engine import engine as engine_module
from eyas.engine.engine import Engine, rows_for
from eyas.engine.policy import BatchView, Decision, StepReport, ladder, limited
from eyas.engine.runner import Runner
from eyas.engine.scheduler import Scheduler
from eyas.engine.sequence import Output
from eyas.engine.stats import PolicyStatistics
from eyas.speculation.sampling import choose
from eyas.target.adapter import HFTarget

CONTEXT = 128
LAYERS = (0, 1)
TREE, BUSH, LONG = DraftShape(4, 3, 12), DraftShape(3, 4, 24), DraftShape(20, 1, 21)


# A target that breaks


class Faulty(HFTarget):
    """Raises for a marked token, computes NaN from another one on, and fails now and then for no reason."""

    def __init__(self, model: Any):
        self.raises_at, self.scheduler = -1, None
        self.random, self.rate = random.Random(0), 0.0
        self.victims: set[str] = set()  # requests that such a fault must end
        self.faults = 0
        super().__init__(model)

    def token_breaks(self, token: int) -> None:
        with torch.no_grad():
            self.model.get_input_embeddings().weight[token] = torch.nan

    def forward(self, block: Any, cache: Any, *, ends: Any = None, images: Any = None) -> Any:
        if bool((block.tokens == self.raises_at).any()):
            raise RuntimeError("this token is too much for me")
        if self.random.random() < self.rate:
            self.fail(block, ends is not None)
        return super().forward(block, cache, ends=ends, images=images)

    def fail(self, block: Any, reading: bool) -> None:
        assert self.scheduler is not None
        batch, count = block.tokens.shape
        running = self.scheduler.running
        if batch == 1 and (reading or count == 1):  # with nobody else to blame, and no draft
            self.victims.add(running[block.slot].request.id)
        elif not reading and count == 1 and sum(s.output_index > 1 for s in running.values()) < 2:
            return  # maybe one request only decodes in this batch
        self.faults += 1
        raise self.random.choice([RuntimeError, torch.OutOfMemoryError])("now and then")


class Mute:
    """A tokenizer that one token is too much for."""

    def __init__(self) -> None:
        self.token = -1

    def decode(self, ids: list[int], **settings: Any) -> str:
        if self.token in ids:
            raise ValueError("I cannot say that")
        return words().decode(ids, **settings)


# What is asked for


@dataclass(frozen=True)
class Ask:
    """A request and the answer it gets by itself."""

    request: Request
    tokens: list[int]
    text: str
    reason: str | None
    error: type | None
    unspeakable: bool  # it is the tokenizer that fails
    stable: bool  # logits a little different would give the same answer


@dataclass
class World:
    """One target with a tokenizer, what is wrong with them, and requests with their answers."""

    target: Faulty
    tokenizer: Mute
    asks: list[Ask] = field(default_factory=list)

    def ask(self, request: Request) -> Ask:
        engine = Engine(self.target, context_length=CONTEXT, tokenizer=self.tokenizer)
        shaken: list[bool] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "choose", lambda *args: shake(shaken, *args))
            answer = decode(engine, request)
        error = type(answer.error) if answer.error else None
        unspeakable = answer.error is not None and "cannot say" in str(answer.error)
        return Ask(request, answer.tokens, answer.text, answer.finish_reason, error, unspeakable, all(shaken))

    def add(self, request: Request) -> Ask:
        made = self.ask(request)
        if made.stable:
            self.asks.append(made)
        return made

    def broken(self) -> list[Ask]:
        return [ask for ask in self.asks if ask.error]


def shake(stable: list[bool], logits: torch.Tensor, rows: Any, draft: Draft, allowed: None) -> Any:
    """Chooses, and notes whether the choice is the same for logits that differ as rounding would make them."""
    choice = choose(logits, rows, draft)  # nothing is constrained
    times = 12
    generator = torch.Generator().manual_seed(0)
    noise = 2e-4 * torch.randn(1, times, logits.shape[-1], generator=generator)
    none = torch.full((1, times), -1)
    again = choose(logits + noise, rows, Draft(none.clamp(min=0), none, none + 1))
    stable.append(bool((again.tokens == choice.tokens).all()))
    return choice


def settings_of(rng: random.Random, room: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {"temperature": 1.2},
        {"temperature": 0.8, "top_k": 12},
        {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 1.1, "frequency_penalty": 0.7},
        {"min_tokens": min(7, room), "stop_token_ids": tuple(range(rng.randrange(40), 90))},
        {"stop_token_ids": tuple(range(rng.randrange(100), 110))},
        {"stop": (f" w{rng.randrange(15):02}",)},
        {"logit_bias": {rng.randrange(zoo.WORDS): 8.0}, "logprobs": 2},
    ]
    most = rng.choice([1, 2, 8, 16, 40, 60])
    return {"max_tokens": min(most, room), "seed": rng.randrange(99), **rng.choice(kinds)}


def made(rng: random.Random, name: str, ids: list[int], images: Any = None) -> Request:
    ids = ids[: CONTEXT - 8]
    settings = settings_of(rng, CONTEXT - len(ids))
    settings["max_tokens"] = max(settings["max_tokens"], settings.get("min_tokens", 1))
    return Request(name, ids, SamplingParams(**settings), images, speculate=rng.random() < 0.8)


def word_list(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 100) for _ in range(count)]


@cache
def tiny() -> World:
    """A llama that is as small as can be."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 1}
    config = tf.LlamaConfig(**{**zoo.DENSE, **sizes, "num_attention_heads": 2})
    world = World(Faulty(zoo.enliven(tf.LlamaForCausalLM(config))), Mute())
    rng = random.Random(1)
    beginnings = [word_list(rng, 50) for _ in range(3)]
    for number in range(36):
        start = rng.choice(beginnings)
        ids = start[: rng.choice([0, 17, 30, 50])] + word_list(rng, rng.choice([1, 5, 20, 40]))
        first = world.add(made(rng, f"a{number}", ids))
        if first.stable and number % 3 == 0:  # a conversation goes on
            again = world.add(made(rng, f"b{number}", [*ids, *first.tokens, *word_list(rng, 5)]))
            ids = [*ids, *first.tokens, *again.request.prompt_ids[-5:], *again.tokens, 3]
            world.add(made(rng, f"c{number}", ids))
    return breaking(world, rng)


def breaking(world: World, rng: random.Random) -> World:
    """Three words that seldom come up in answers become too much: for the target, in two ways, and the tokenizer."""
    common = {token for ask in world.asks for token in ask.request.prompt_ids}
    counts = Counter(token for ask in world.asks for token in set(ask.tokens[:-1]) - common)
    raising, poison, unspeakable = sorted(counts, key=lambda token: (abs(counts[token] - 2), token))[:3]
    world.target.raises_at, world.tokenizer.token = raising, unspeakable
    world.target.token_breaks(poison)
    requests = [ask.request for ask in world.asks]
    for number, token in enumerate((raising, poison)):
        for place in (3, 40):
            ids = word_list(rng, 60)
            ids[place] = token
            requests.append(made(rng, f"x{number} {place}", ids))
    world.asks = []
    for request in requests:
        world.add(request)
    assert len({ask.request.id[0] for ask in world.asks if ask.error}) >= 2, "faults in prompts and in answers"
    return world


@cache
def seeing(name: str) -> World:
    """A model for images: the same one before different words, and other ones, beside requests without."""
    world, rng = World(Faulty(zoo.case(name).build()), Mute()), random.Random(2)
    for seed in range(3):
        ids, images = zoo.case(name).image_prompt(30, seed)
        for number in range(2):
            answer = world.add(made(rng, f"i{seed} {number}", ids, images))
            longer = [*ids, *answer.tokens, *word_list(rng, 9)][: CONTEXT - 8]
            world.add(made(rng, f"j{seed} {number}", longer, typed(images, len(longer))))
        forced = made(rng, f"f{seed}", ids, images)
        if forced.sampling.max_tokens > 1:
            world.add(replace(forced, output_ids=word_list(rng, 1)))
        world.add(made(rng, f"t{seed}", word_list(rng, 25)))
    return world


def typed(images: zoo.Images, length: int) -> zoo.Images:
    """The same images in a longer prompt, behind whose end there are words only."""
    return {
        key: torch.nn.functional.pad(value, (0, length - value.shape[1])) if key.endswith("token_type_ids") else value
        for key, value in images.items()
    }


# Who drafts


class Scripts(Mapping[str, Script]):
    """By the ids under which the requests are sent."""

    def __init__(self, world: World):
        self.known = {ask.request.id: self.script(world, ask) for ask in world.asks}

    @staticmethod
    @torch.no_grad()
    def script(world: World, ask: Ask) -> Script:
        request = ask.request
        answer = [*request.output_ids, *ask.tokens]
        if ask.error or request.images:
            return Script(answer)
        ids = torch.tensor([[*request.prompt_ids, *answer]])
        out = world.target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        return Script(answer, torch.cat([out.hidden_states[layer] for layer in LAYERS], dim=-1)[0])

    def __getitem__(self, id: str) -> Script:
        return self.known[id.split("#")[0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


def random_one(world: World) -> Eagle3Drafter:
    target = world.target
    model = untrained(target.hidden_size, target.num_layers, target.vocab_size, draft_vocab_size=90)
    model.draft_to_target.copy_(
        torch.randperm(zoo.WORDS, generator=torch.Generator().manual_seed(0))[:90].sort().values
    )
    return Eagle3Drafter(lively(model))


DRAFTERS: dict[str, Any] = {
    "none": lambda world, shape: None,
    "scripted": lambda world, shape: ScriptedDrafter(
        Scripts(world), lambda step: step % (shape.num_steps + 1), layer_ids=LAYERS
    ),
    "random": lambda world, shape: random_one(world),
}


class Whims:
    """A policy that has moods: one shape, any shape at every step, or none for a while."""

    def __init__(self, shape: DraftShape, seed: int):
        self.shapes, self.random = ladder(shape), random.Random(seed)
        self.mood: list[DraftShape | None] = [None]
        self.chosen: Counter[Any] = Counter()

    def decide(self, view: BatchView) -> Decision:
        rng = self.random
        assert 1 <= view.drafted <= view.sequences <= view.bucket or (view.drafted == 0 < view.sequences)
        if rng.random() < 0.06:
            self.mood = rng.choice([[None], [rng.choice(self.shapes)], [None, *self.shapes], [None, *self.shapes]])
        shape = rng.choice(self.mood)
        if shape is not None:
            shape = limited(shape, view.room - 1) if view.drafted else None
        self.chosen[shape] += 1
        self.sequences = view.sequences
        return Decision(shape, "a whim", follow=rng.random() < 0.7)

    def observe(self, report: StepReport) -> None:
        assert report.emitted >= self.sequences <= report.B
        assert len(report.reached) == len(report.accepted) == report.draft_depth
        assert all(a <= r <= self.sequences for r, a in zip(report.reached, report.accepted, strict=True))

    def follow(self) -> bool:
        return self.random.random() < 0.8

    def statistics(self) -> PolicyStatistics:
        raise AssertionError("nobody asks")


# The storm


@dataclass
class Call:
    """A request that was sent, and what came of it so far."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    text: str = ""


class Storm:
    def __init__(self, world: World, drafter: str, shape: DraftShape, seed: int, rows: float, running: int):
        self.world, self.random = world, random.Random(seed)
        self.policy = Whims(shape, seed)
        made: Drafter | None = DRAFTERS[drafter](world, shape)
        self.engine = Engine(
            world.target,
            made,
            shape=shape,
            context_length=CONTEXT,
            tokenizer=world.tokenizer,
            max_running_requests=running,
            kv_rows=int(rows * rows_for(CONTEXT, shape)),
            chunked_prefill_size=self.random.choice([7, 24, 64]),
            policy=self.policy,
        )
        self.calls: dict[str, Call] = {}
        self.seen: Counter[str] = Counter()

    def run(self, steps: int, faults: float, crowd: int) -> Counter[str]:
        target = self.world.target
        target.scheduler, target.rate, target.victims = self.engine.scheduler, faults, set()
        target.random.seed(self.random.random())
        try:
            for _ in range(steps):
                self.come_and_go(crowd)
                self.step()
            for _ in range(3000):
                if self.engine.idle:
                    break
                self.step()
        finally:
            target.scheduler, target.rate = None, 0.0
        assert self.engine.idle and not self.calls, "somebody is never answered"
        self.seen["preemptions"] = self.engine.scheduler.preemptions
        self.calm()
        return self.seen

    def come_and_go(self, crowd: int) -> None:
        rng = self.random
        while len(self.calls) < crowd and rng.random() < 0.4:
            ask = rng.choice(self.world.asks)
            self.seen["sent"] += 1
            id = f"{ask.request.id}#{self.seen['sent']}"
            self.calls[id] = Call(ask)
            self.engine.add(replace(ask.request, id=id))
        if self.calls and rng.random() < 0.03:
            id = rng.choice(list(self.calls))
            self.engine.abort(id)
            del self.calls[id]
            self.seen["aborts"] += 1

    def step(self) -> None:
        self.seen["steps"] += 1
        outputs = self.engine.step()
        self.engine.scheduler.check()
        cache = self.engine.runner.cache
        parts = cache.views(0, cache.slots, cache.length).values()
        assert all(bool(part.isfinite().all()) for pair in parts for part in pair), "NaN that others may meet"
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            self.hear(output)

    def hear(self, output: Output) -> None:
        call, id = self.calls[output.request_id], output.request_id
        ask = call.ask
        call.tokens += [token.token_id for token in output.emitted]
        call.text += output.text
        self.seen["drafted"] += sum(token.drafted for token in output.emitted)
        assert call.tokens == ask.tokens[: len(call.tokens)], f"{id} is not answered as if alone"
        if output.finish_reason is None:
            assert id not in self.world.target.victims
            return
        del self.calls[id]
        self.seen[output.finish_reason] += 1
        self.seen["hits"] += output.cached_tokens > 0
        if id in self.world.target.victims:
            assert isinstance(output.error, EyasError) and not output.emitted
            self.seen["victims"] += 1
            return
        if ask.error is EyasError and ask.unspeakable:  # of the step that ends like this nothing is told
            assert isinstance(output.error, EyasError)
            self.seen["unspeakable"] += 1
            return
        found = (call.tokens, call.text, output.finish_reason, type(output.error) if output.error else None)
        assert found == (ask.tokens, ask.text, ask.reason, ask.error), id

    def calm(self) -> None:
        """Nothing is left over that harms anybody: every kind of request once more."""
        scheduler = self.engine.scheduler
        assert not scheduler.running and not scheduler.waiting
        for ask in self.random.sample([ask for ask in self.world.asks if not ask.unspeakable], 5):
            answer = decode(self.engine, ask.request)
            assert (answer.tokens, answer.finish_reason) == (ask.tokens, ask.reason), ask.request.id


STORMS: dict[str, tuple[str, DraftShape, float, int, float, int]] = {
    # drafter, shape, memory in requests of full length, requests at once, faults a pass, requests in sight
    "alone": ("scripted", BUSH, 1, 1, 0.0, 3),
    "no memory": ("scripted", TREE, 1, 4, 0.006, 6),
    "little memory": ("scripted", BUSH, 2.2, 6, 0.006, 10),
    "all fit": ("scripted", TREE, 6, 6, 0.006, 8),
    "long chains": ("scripted", LONG, 3, 5, 0.006, 8),
    "many": ("scripted", TREE, 5, 18, 0.003, 26),
    "faults everywhere": ("scripted", TREE, 3, 5, 0.05, 8),
    "random drafts": ("random", TREE, 1.6, 5, 0.006, 8),
    "random bush": ("random", BUSH, 4, 9, 0.0, 14),
    "no drafter": ("none", TREE, 1.6, 6, 0.01, 9),
}
STEPS = 1000


@pytest.mark.parametrize("name", STORMS)
@pytest.mark.thorough
def test_a_storm(name):
    drafter, shape, memory, running, faults, crowd = STORMS[name]
    seen = Storm(tiny(), drafter, shape, 7, memory, running).run(STEPS, faults, crowd)
    assert seen["steps"] >= STEPS
    assert min(seen[what] for what in ("length", "stop", "error", "aborts", "hits")) > 3
    assert (seen["victims"] > 0) == (faults > 0)
    if drafter == "scripted":
        assert seen["drafted"] > 100
    if 1 < memory <= running / 2:  # where no more than one fits that is not short, they seldom get in each other's way
        assert seen["preemptions"] > 0


@pytest.mark.parametrize("name", ["kimi-k2.5", "qwen2.5-vl", "gemma3-vl"])
@pytest.mark.thorough
def test_a_storm_with_images(name):
    seen = Storm(seeing(name), "scripted", TREE, 5, 2.5, 5).run(250, 0.004, 8)
    assert min(seen[what] for what in ("length", "aborts", "hits", "drafted", "victims")) > 0


class Wild(ScriptedDrafter):
    """Drafts a token for nobody that breaks the target."""

    poison = -1

    def propose(self, drafting: Any, shape: DraftShape) -> Draft:
        draft = super().propose(drafting, shape)
        for row, sequence in enumerate(drafting.sequences):
            if sequence is None:
                draft.tokens[row, 1:] = self.poison
        return draft


def test_a_draft_for_nobody_leaves_nothing_behind(monkeypatch):
    """Three decode in a batch of four: the fourth row's draft is computed too, in a slot that somebody else may get."""
    storm = Storm(tiny(), "none", TREE, 0, 4, 3)
    weight = storm.world.target.get_embed_and_head()[0]
    storm.engine = with_drafter(storm, Wild(Scripts(storm.world), layer_ids=LAYERS))
    storm.engine.drafter.poison = int(weight.isnan().any(1).nonzero()[0])
    storm.run(60, 0.0, 4)
    plant(monkeypatch, Runner, "propose", "enumerate(sequences) if s is None", "batch.members if not s.follows")
    with pytest.raises(AssertionError):
        storm.run(60, 0.0, 4)


def with_drafter(storm: Storm, drafter: Drafter, policy: Any = None) -> Engine:
    world = storm.world
    settings = {"context_length": CONTEXT, "tokenizer": world.tokenizer, "max_running_requests": 3}
    return Engine(world.target, drafter, shape=TREE, policy=policy, **settings)


class Stubborn(Whims):
    """Drafts for some steps, whatever comes of it, then goes on plainly and wants the drafter to keep up."""

    drafts = 20

    def decide(self, view: BatchView) -> Decision:
        self.chosen["steps"] += 1
        self.sequences = view.sequences
        return Decision(TREE if self.chosen["steps"] <= self.drafts else None, "stubborn", follow=True)

    def follow(self) -> bool:
        return True


def test_a_drafter_that_fails_for_long_is_given_up(monkeypatch):
    """What the target computes meanwhile is more than is kept for it."""
    world = tiny()
    asked = next(ask for ask in world.asks if len(ask.tokens) > 30 and not ask.error)
    request = replace(asked.request, speculate=True)

    def fails(*args: Any) -> Any:
        raise RuntimeError("no drafts today")

    def answer() -> list[int]:
        storm = Storm(world, "none", TREE, 0, 4, 3)
        engine = with_drafter(storm, ScriptedDrafter(Scripts(world), layer_ids=LAYERS), Stubborn(TREE, 0))
        tokens: list[int] = []
        engine.add(request)
        tokens += [token.token_id for output in engine.step() for token in output.emitted]
        engine.drafter.propose = engine.drafter.extend = fails
        while not engine.idle:
            tokens += [token.token_id for output in engine.step() for token in output.emitted]
        return tokens

    for drafts in (20, 0):
        monkeypatch.setattr(Stubborn, "drafts", drafts)
        assert answer() == asked.tokens
    plant(monkeypatch, Engine, "_follow", "except Exception", "except KeyError")
    with pytest.raises((RuntimeError, ValueError)):
        answer()


BUGS = {
    "the state that waits is overwritten": (Runner, "keep", "else self.catch_up_most for s", "else 0 for s"),
    "catching up starts too late": (Runner, "catch_up", "s.length - s.pending if s", "s.length - s.pending + 1 if s"),
    "the fault of one is that of all": (
        Engine, "_decode", "[self._alone(sequence) for _, sequence in members]",
        "[self._fail(sequence, error) for _, sequence in members]",
    ),
    "what a draft broke stays": (Engine, "_alone", "self.runner.drop_draft(sequence)", "pass"),
    "NaN stays in the slot": (Engine, "_fail", "self.runner.clear(slot)", "pass"),
    "NaN is met at the end of the prompt": (Engine, "_read", "if not finite or (complete", "if (complete"),
    "what a group's fault leaves undone": (
        Engine, "_read", "return [output for piece in pieces for output in self._read([piece])]", "return []",
    ),
    "the fault of one is that of all who are read": (
        Engine, "_read", "self._read([piece])]", "[self._fail(piece.sequence, error)]]",
    ),
    "moved over what was there": (Scheduler, "_move", "self._vacate(dest)", "pass"),
    "what belongs to a slot stays behind": (
        Runner, "arrange", "self._pending[move.dest] = self._pending[move.source]", "pass"
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.thorough
def test_these_storms_see(bug, monkeypatch):
    world = tiny()
    plant(monkeypatch, *BUGS[bug])
    with pytest.raises((AssertionError, ValueError, IndexError, StopIteration, Wrong)):
        for name in ("many", "little memory", "random bush", "faults everywhere"):
            drafter, shape, memory, running, faults, crowd = STORMS[name]
            Storm(world, drafter, shape, 7, memory, running).run(300, faults, crowd)
