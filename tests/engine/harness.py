"""Engines over the zoo's models, and what transformers' own plain decoding says they must produce."""

from __future__ import annotations

import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from scripted import Errs, Script, ScriptedDrafter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from eyas.core import DraftShape, EyasError, Request, SamplingParams
from eyas.drafter.contract import Drafter
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model, untrained
from eyas.engine.engine import Engine
from eyas.engine.sequence import Emitted, Output
from eyas.engine.stats import AcceptanceStats
from eyas.target.adapter import HFTarget

CHAIN, TREE, BUSH = DraftShape(5, 1, 6), DraftShape(4, 3, 12), DraftShape(3, 4, 24)
SHAPES = {"chain": CHAIN, "tree": TREE, "bush": BUSH}
LAYERS = (0, 1, 2)  # captured for scripted drafters
CONTEXT = 128


# The truth


@dataclass(frozen=True)
class Truth:
    """A prompt and transformers' greedy continuation of it."""

    name: str
    prompt: list[int]
    images: zoo.Images | None
    tokens: list[int]

    def request(self, id: str = "r", **sampling: Any) -> Request:
        """Asks for this continuation; ``sampling`` are settings other than greedy's."""
        return Request(id, self.prompt, SamplingParams(**{"max_tokens": len(self.tokens), **sampling}), self.images)

    @property
    def script(self) -> Script:
        return script(self.name, tuple(self.prompt), self.images, self.tokens)


@cache
def truth(name: str, image: bool = False, length: int = 30, tokens: int = 64) -> Truth:
    """The first of a few random prompts that is answered in lively fashion and without near-ties."""
    case = zoo.case(name)
    for seed in range(8):
        prompt, images = case.image_prompt(length, seed) if image else (case.prompt(length, seed), None)
        text, gap = greedy(name, prompt, images, tokens)
        if len(set(text)) >= min(20, tokens // 2) and gap > 1e-3:
            return Truth(name, prompt, images, text)
    raise AssertionError(f"{name} loops or has near-ties after every prompt of {length}")


def greedy(name: str, prompt: list[int], images: zoo.Images | None, tokens: int) -> tuple[list[int], float]:
    """transformers' own decoding, and the smallest gap between the two best logits on the way."""
    out = zoo.case(name).model.generate(
        torch.tensor([prompt]),
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **(images or {}),
    )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@torch.no_grad()
def plain_pass(name: str, ids: list[int], images: zoo.Images | None = None) -> Any:
    """One forward over everything, without cache, masks or hooks of ours."""
    grown = {
        key: torch.nn.functional.pad(value, (0, len(ids) - value.shape[1])) if key.endswith("token_type_ids") else value
        for key, value in (images or {}).items()
    }
    return zoo.case(name).model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True, **grown)


def script(name: str, prompt: Iterable[int], images: zoo.Images | None, tokens: list[int]) -> Script:
    """What a scripted drafter needs to draft ``tokens`` and to check the states it is given."""
    out = plain_pass(name, [*prompt, *tokens], images)
    states = torch.cat([out.hidden_states[layer] for layer in LAYERS], dim=-1)[0]
    return Script(tokens, states, out.hidden_states[0][0] if images else None, zoo.IMAGE)


# Engines


@cache
def target_of(name: str) -> HFTarget:
    return HFTarget(zoo.case(name).model)


def engine_for(name: str, drafter: Drafter | None = None, shape: DraftShape | None = None, **settings: Any) -> Engine:
    """Nothing is wrong with these targets: what fails shall not be hidden by decoding plainly instead."""
    engine = Engine(target_of(name), drafter, shape=shape, **{"context_length": CONTEXT, **settings})
    engine._alone = undisturbed  # type: ignore[method-assign]
    return engine


def undisturbed(sequence: Any) -> Output:
    raise AssertionError("a step failed and would have been done again, plainly")


def scripted(scripts: Mapping[str, Script] | Script, errs: Errs = lambda step: 0) -> ScriptedDrafter:
    """A drafter for these requests, by id; a single script is that of request ``r``."""
    return ScriptedDrafter({"r": scripts} if isinstance(scripts, Script) else scripts, errs, layer_ids=LAYERS)


def lively(model: Eagle3Model, seed: int = 0) -> Eagle3Model:
    """Weights at which everything makes a difference to what is drafted."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.dim() == 1 else 1.5 * noise * weight.shape[-1] ** -0.5)
    return model


DRAFTERS: dict[str, dict[str, Any]] = {
    "standard": {},
    "reduced vocabulary": {"draft_vocab_size": 40},
    "two layers, all norms": {
        "num_hidden_layers": 2,
        "norm_output": True,
        "fc_norm": True,
        "norm_before_residual": True,
        "qk_norm": True,
    },
}


def random_drafter(name: str, kind: str = "standard", seed: int = 0, **overrides: Any) -> Eagle3Drafter:
    target = target_of(name)
    settings = {**DRAFTERS[kind], **overrides}
    model = untrained(target.hidden_size, target.num_layers, target.vocab_size, seed=seed, **settings)
    if model.config.draft_vocab_size < target.vocab_size:
        chosen = torch.randperm(zoo.WORDS, generator=torch.Generator().manual_seed(seed))
        model.draft_to_target.copy_(chosen[: model.config.draft_vocab_size].sort().values)
    return Eagle3Drafter(lively(model, seed))


@cache
def words() -> PreTrainedTokenizerFast:
    """A tokenizer for the zoo's vocabulary: token 7 is the word ``w007``."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({f"w{i:03}": i for i in range(zoo.VOCAB)})))


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Puts a bug into the source of a function or method; fails if the source no longer has the place."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has changed: plant this bug anew"
    made: dict[str, Any] = {}
    exec(source.replace(old, new), inspect.unwrap(function).__globals__, made)
    monkeypatch.setattr(owner, name, made[name])


# Answers


@dataclass
class Answer:
    """All that an engine said of one request."""

    outputs: list[Output] = field(default_factory=list)

    @property
    def emitted(self) -> list[Emitted]:
        return [token for output in self.outputs for token in output.emitted]

    @property
    def tokens(self) -> list[int]:
        return [token.token_id for token in self.emitted]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason

    @property
    def error(self) -> EyasError | None:
        return self.outputs[-1].error

    @property
    def stats(self) -> AcceptanceStats:
        stats = self.outputs[-1].stats
        assert stats is not None
        return stats


def run(engine: Engine, *requests: Request) -> dict[str, Answer]:
    """Adds all requests, steps until the engine is idle, and checks what must hold of any run."""
    answers = {request.id: Answer() for request in requests}
    for request in requests:
        engine.add(request)
    collect(engine, answers)
    return answers


def collect(engine: Engine, answers: dict[str, Answer]) -> None:
    for _ in range(500):
        if engine.idle:
            break
        for output in engine.step():
            answers[output.request_id].outputs.append(output)
        engine.scheduler.check()
    assert engine.idle, "it never ends"
    for answer in answers.values():
        assert [output.finish_reason is not None for output in answer.outputs[:-1]].count(True) == 0


def decode(engine: Engine, request: Request) -> Answer:
    return run(engine, request)[request.id]


def plainly(request: Request) -> Request:
    return replace(request, speculate=False)


def accept_lengths(stats: AcceptanceStats) -> Counter[int]:
    """How many verify steps accepted exactly so many draft tokens."""
    at_least = [stats.steps, *stats.accepted, 0]
    return Counter(
        {n: at_least[n] - at_least[n + 1] for n in range(len(at_least) - 1) if at_least[n] > at_least[n + 1]}
    )
