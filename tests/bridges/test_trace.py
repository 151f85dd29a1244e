"""Every fault that an engine's drafter can have, seeded into what it would have recorded: each is named, and no other.

The engine is a few lines of plain decoding here: states from transformers' own outputs, the drafter run anew over all
of its slots at every step. Its calls are written by the plugin's own functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from engine.harness import plain_pass, random_drafter, target_of, truth
from training.taught import taught

from eyas.bridges.probe import examine
from eyas.bridges.reference import _sketched, reference
from eyas.bridges.trace import (
    STAGES,
    STATES,
    Comparison,
    Difference,
    Reference,
    Row,
    Step,
    Trace,
    _states,
    compare,
    distance,
    fix,
    read,
)
from eyas.core import EyasError
from eyas.drafter.model import Eagle3Model
from plugin import environments

NAME, STEPS = "llama", 3
KINDS = ("reduced vocabulary", "two layers, all norms")


@pytest.fixture(autouse=True)
def plugin(monkeypatch, tmp_path) -> Any:
    """The plugin's tracing, writing to a folder."""
    monkeypatch.syspath_prepend(environments.ROOT / "plugin" / "src")
    from eyas_plugin import trace

    (tmp_path / "calls").mkdir()
    monkeypatch.setenv("EYAS_PLUGIN_TRACE", str(tmp_path / "calls"))
    return trace


def same(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass
class Engine:
    """Decodes as engines do, K drafted tokens a step, rejected rows included; each field but the first is a fault."""

    model: Eagle3Model
    layers: tuple[int, ...] = ()  # fed in place of the drafter's
    shift: int = 1  # slot i is fed token i + shift
    extend_shift: int = 1  # the same behind the prompt only
    position: Callable[[int], int] = field(default=lambda place: place)
    draft_position: int = 0  # further
    embedding: Callable[[torch.Tensor], torch.Tensor] = same
    fused: Callable[[torch.Tensor], torch.Tensor] = same
    head: Callable[[torch.Tensor], torch.Tensor] = same
    map: Callable[[torch.Tensor], torch.Tensor] = same  # of the draft vocabulary
    worker_map: Callable[[int], int] = field(default=lambda token: token)  # of what goes on, outside of the model
    noise: float = 0.0  # relative, on everything that is recorded
    worker: bool = False  # as SGLang: no state is named with the logits

    def record(self, trace: Any, length: int = 30) -> tuple[list[int], list[int]]:
        """Prompt and answer; the calls are in the folder."""
        told = truth(NAME, length=length)
        tokens, prompt, model = [*told.prompt, *told.tokens], len(told.prompt), self.model
        model.bind(*target_of(NAME).get_embed_and_head())
        entering = states_of(tokens)
        states = torch.cat([entering[layer] for layer in self.layers or model.aux_layer_ids], dim=-1)
        trace.write("drafter", engine="vllm", **{"class": "Eagle3"}, dtype="float32", config={})
        done, drafted = 0, list[int]()
        while done + 1 < len(tokens) - STEPS:
            count = prompt if not drafted else 1 + STEPS
            right = prompt if not drafted else 1 + self._accepted(drafted, tokens[done + 1 :])
            shift = self.shift if not drafted else self.shift * self.extend_shift
            fed = [tokens[done + i + shift] for i in range(right)] + drafted[right:]
            fed += [0] * (count - len(fed))
            trace.write_states(self._noisy(states[done : done + count]), Config())
            slots = self._slots(tokens, done, fed[:right], states)
            drafted = self._draft(trace, slots, fed, done, right, count)
            done += right
        return told.prompt, told.tokens

    def _accepted(self, drafted: list[int], following: list[int]) -> int:
        return next((n for n, (a, b) in enumerate(zip(drafted, following, strict=False)) if a != b), STEPS)

    def _slots(self, tokens: list[int], done: int, fed: list[int], states: torch.Tensor) -> list[Any]:
        """Everything up to the newest true slot: its embedding, its fused state, its position."""
        ids = [tokens[i + 1] for i in range(done)] + fed
        embeds = self.embedding(self.model.embed(torch.tensor([ids])))
        fused = self.fused(self.model.fuse(states[None, : len(ids)]))
        return [embeds, fused, [self.position(place) for place in range(len(ids))]]

    @torch.no_grad()
    def _draft(self, trace: Any, slots: list[Any], fed: list[int], done: int, right: int, count: int) -> list[int]:
        embeds, fused, positions = slots
        out = self.model(embeds, fused, torch.tensor([positions]))
        padding = torch.zeros(1, count - right, embeds.shape[-1])
        rows = [torch.cat((x[:, done:], padding), 1)[0] for x in (fused, embeds, out.normed)]
        self._forward(trace, fed, positions[done:] + [0] * (count - right), *rows)
        normed, carried, drafted = out.normed[0, -1:], out.next_hidden[:, -1:], list[int]()
        while True:
            drafted.append(self.worker_map(self._logits(trace, normed)))
            if len(drafted) == STEPS:
                return drafted
            embed = self.embedding(self.model.embed(torch.tensor([[drafted[-1]]])))
            embeds, fused = torch.cat((embeds, embed), 1), torch.cat((fused, carried), 1)
            positions = [*positions, positions[-1] + 1 + (self.draft_position if len(drafted) == 1 else 0)]
            out = self.model(embeds, fused, torch.tensor([positions]))
            normed = out.normed[0, -1:]
            self._forward(trace, drafted[-1:], positions[-1:], fused[0, -1:], embed[0], normed)
            carried = out.next_hidden[:, -1:]

    def _forward(self, trace: Any, tokens: list[int], positions: list[int], *states: torch.Tensor) -> None:
        names = ("entering", "embedding", "normed")
        sketches = {name: trace.sketches(self._noisy(s)) for name, s in zip(names, states, strict=True)}
        trace.write("forward", tokens=tokens, positions=positions, **sketches)

    def _logits(self, trace: Any, normed: torch.Tensor) -> int:
        logits = self._noisy(self.head(self.model.logits(normed)))
        ids = self.map(self.model.draft_to_target)
        trace.write_logits(logits, None if self.worker else self._noisy(normed), ids)
        return int(ids[logits.argmax()])

    def _noisy(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))


class Config:
    hidden_size = 32


def states_of(tokens: list[int]) -> list[torch.Tensor]:
    """[T, H] entering each layer as transformers says; leaving the last one by a hook, before the final norm."""
    left: list[torch.Tensor] = []
    last = zoo.case(NAME).model.model.layers[-1]
    hook = last.register_forward_hook(lambda *call: left.append(call[2] if torch.is_tensor(call[2]) else call[2][0]))
    try:
        hidden = plain_pass(NAME, tokens).hidden_states
    finally:
        hook.remove()
    return [states[0] for states in (*hidden[:-1], *left)]


def traced(engine: Engine, plugin: Any, tmp_path: Path, length: int = 30) -> Trace:
    prompt, answer = engine.record(plugin, length)
    (file,) = (tmp_path / "calls").glob("*.jsonl")
    return read([json.loads(line) for line in file.read_text().splitlines()], prompt, answer)


def compared(engine: Engine, model: Eagle3Model, plugin: Any, tmp_path: Path, length: int = 30) -> Comparison:
    return examine(target_of(NAME), model, traced(engine, plugin, tmp_path, length))


def drafter(kind: str = KINDS[0]) -> Eagle3Model:
    return random_drafter(NAME, kind, aux_layer_ids=(1, 2, 3)).model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("worker", [False, True], ids=["vllm", "sglang"])
def test_a_good_pair(plugin, tmp_path, kind, worker):
    found = compared(Engine(drafter(kind), worker=worker), drafter(kind), plugin, tmp_path)
    assert found.fault is None and found.notes == ()
    assert found.steps > 20 and found.rows > 50 and max(found.off.values()) < 0.001
    assert set(found.off) == {"states", "embedding", "fusion", "carried", "layer", "rope", "cache", "head", "d2t"}


def test_accepted_tokens_are_followed(plugin, tmp_path):
    """Steps behind the prompt have as many true rows as tokens were emitted; those of rejected ones are left out."""
    model = taught(KINDS[0]).model
    trace = traced(Engine(model), plugin, tmp_path, length=12)
    rows = [len(step.rows) for step in trace.steps if step.depth == 0]
    assert rows[0] == 12 and {1, 2, 3} <= set(rows[1:])
    found = examine(target_of(NAME), model, trace)
    assert found.fault is None and found.off["cache"] < 0.001


def test_an_answer_that_ends_within_an_accepted_run(plugin, tmp_path):
    """More was accepted than asked for, and the engine drafts on from behind it: from which slot is not known."""
    model = taught(KINDS[0]).model
    prompt, answer = Engine(model).record(plugin, 12)
    (file,) = (tmp_path / "calls").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    rounds = [step for step in read(lines, prompt, answer).steps if step.depth == 0]
    number = next(n for n, step in enumerate(rounds[1:-1], 1) if len(step.rows) > 2)
    place, behind = rounds[number].place, [i for i, line in enumerate(lines) if line["call"] == "fuse"][number + 1]
    trace = read(lines[:behind], prompt, answer[: place + 2 - len(prompt)])
    assert examine(target_of(NAME), model, trace).fault is None
    last = trace.steps[-1]
    assert (last.place, last.depth, len(last.rows)) == (place, 0, 1)


@pytest.mark.parametrize("noise", [0.004, 0.01])
def test_rounding_is_no_fault(plugin, tmp_path, noise):
    """bfloat16 rounds by up to 0.4%, and what it comes to after all layers is more."""
    trace = traced(Engine(drafter(), noise=noise), plugin, tmp_path)
    reference_ = reference(target_of(NAME), drafter(), trace)
    assert compare(trace, reference_, "bfloat16").fault is None


def turned(model: Eagle3Model, **config: Any) -> Eagle3Model:
    """The same weights under another config."""
    other = Eagle3Model(replace(model.config, **config))
    other.load_state_dict(model.state_dict())
    return other.eval()


# stage, what the text must say, and the engine
FAULTS: dict[str, tuple[str, str, Callable[[], Engine]]] = {
    "token itself": ("tokens", "slot i is fed token i itself", lambda: Engine(drafter(), shift=0)),
    "a token too far": ("tokens", "slot i is fed token i+2", lambda: Engine(drafter(), shift=2)),
    "only behind the prompt": ("tokens", "in place of", lambda: Engine(drafter(), extend_shift=2)),
    "one layer early": (
        "states",
        "entering layers [0, 1, 2], where the drafter was trained on [1, 2, 3]",
        lambda: Engine(drafter(), layers=(0, 1, 2)),
    ),
    "one layer late": (
        "states",
        "output ids [1, 2, 3] in place of [0, 1, 2]",
        lambda: Engine(drafter(), layers=(2, 3, 4)),
    ),
    "only the last one": ("states", "layers [1, 2, 4],", lambda: Engine(drafter(), layers=(1, 2, 4))),
    "reversed": ("states", "layers [3, 2, 1],", lambda: Engine(drafter(), layers=(3, 2, 1))),
    "positions stand still": ("positions", "slot 1 is at position 0", lambda: Engine(drafter(), position=lambda p: 0)),
    "positions jump": (
        "positions",
        "slot 5 is at position 7, where 5",
        lambda: Engine(drafter(), position=lambda p: p + 2 * (p > 4)),
    ),
    "drafted positions": ("positions", "position 33, where 30", lambda: Engine(drafter(), draft_position=3)),
    "embedding of others": ("embedding", "are others", lambda: Engine(drafter(), embedding=lambda x: x.flip(-1))),
    "fc": ("fusion", "what fc", lambda: Engine(drafter(), fused=lambda x: x + 0.3 * x.flip(-1))),
    "residual": (
        "layer",
        "from the first slot on",
        lambda: Engine(turned(drafter(), norm_before_residual=True)),
    ),
    "RoPE": (
        "rope",
        "rotates otherwise",
        lambda: Engine(turned(drafter(), rope={"rope_type": "default", "rope_theta": 50.0})),
    ),
    "carried": ("carried", "another state", lambda: Engine(turned(drafter(), norm_output=True))),
    "head": ("head", "other logits", lambda: Engine(drafter(), head=lambda x: x + x.roll(1, -1))),
    "head of nothing": ("head", "other logits", lambda: Engine(drafter(), head=lambda x: x * float("nan"))),
    "no d2t": ("d2t", "their tokens are not", lambda: Engine(drafter(), map=lambda ids: torch.arange(len(ids)))),
    "d2t of another": ("d2t", "their tokens are not", lambda: Engine(drafter(), map=lambda ids: ids.flip(0))),
    "d2t left out by the worker": (
        "d2t",
        "its own best was",
        lambda: Engine(drafter(), worker=True, worker_map=lambda token: (token + 7) % 150),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(plugin, tmp_path, name):
    stage, says, made = FAULTS[name]
    engine = made()
    found = compared(engine, drafter(), plugin, tmp_path)
    assert found.fault is not None, found.off
    assert found.fault.stage == stage, found.fault
    assert says in found.fault.text
    assert "vllm" in fix(found.fault, "vllm") or stage in ("embedding", "head")


def test_every_stage_is_tested_and_has_a_fix():
    seeded = {stage for stage, _, _ in FAULTS.values()}
    assert seeded == set(STAGES) - {"cache"}  # which is below


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("worker", [False, True], ids=["vllm", "sglang"])
def test_ties_are_no_fault(plugin, tmp_path, worker, which):
    """bfloat16 gives several tokens the same logit, and of these an engine may go on with any."""
    ties = []

    class Coarse(Engine):
        def _logits(self, trace, normed):
            exact, ids = self.model.logits(normed), self.model.draft_to_target
            logits = (exact / (0.2 * exact.std())).round() * 0.2 * exact.std()
            trace.write_logits(logits, None if self.worker else normed, ids)
            best = (logits[0] == logits.max()).nonzero()[:, 0]
            ties.append(len(best) > 1)
            return int(ids[best[which]])

    model = taught(KINDS[0]).model
    trace = traced(Coarse(model, worker=worker), plugin, tmp_path, length=12)
    found = compare(trace, reference(target_of(NAME), model, trace), "bfloat16")
    assert found.fault is None, found.fault
    assert sum(ties) > 3 and trace.steps[-1].place > len(trace.tokens) - 3 * STEPS


@pytest.mark.parametrize(("behind", "rows"), [(5, 2), (0, 1)], ids=["accepted", "rejected"])
def test_which_of_a_tie_was_drafted(behind, rows):
    """4 and 7 have the same logit, the answer goes on with 4: where that was drafted, its slot is fed what follows."""

    def calls(*tokens: int, top: Any) -> list[dict[str, Any]]:
        size, sketch = len(tokens), [1.0, 1.0]
        sketches = dict.fromkeys(("entering", "embedding", "normed"), [sketch] * size)
        forward = {"call": "forward", "tokens": tokens, "positions": [0] * size, **sketches}
        return [{"call": "fuse", "states": [[sketch]] * size}, forward, {"call": "logits", "top": top}]

    lines = [*calls(2, 3, top=[[(7, 1.0), (4, 1.0)]]), *calls(4, behind, top=[[(6, 1.0)]] * 2)]
    trace = read(lines, [1, 2], [3, 4, 5, 6])
    assert [(step.place, len(step.rows)) for step in trace.steps] == [(0, 2), (2, rows)]


def test_padding_behind_the_prompt_is_left_out(plugin, tmp_path):
    """Engines round the number of rows up."""
    model = drafter()
    prompt, answer = Engine(model).record(plugin)
    (file,) = (tmp_path / "calls").glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[1:3]:  # what is fused of the prompt, and its forward
        for name in line.keys() - {"call"}:
            assert len(line[name]) == len(prompt)
            line[name] += [line[name][0]] * 2
    found = examine(target_of(NAME), model, read(lines, prompt, answer))
    assert found.fault is None and found.steps > 20


def test_tokens_and_positions_that_there_are_not(plugin, tmp_path):
    """A broken map drafts what no embedding holds, a broken counter goes below 0: said, not stumbled over."""
    trace = traced(Engine(drafter()), plugin, tmp_path)
    number = next(i for i, step in enumerate(trace.steps) if step.depth)
    (row,) = trace.steps[number].rows
    for change, stage in (({"token": 10**6}, "d2t"), ({"position": -5}, "positions")):
        steps = [*trace.steps[:number], replace(trace.steps[number], rows=[replace(row, **change)])]
        found = examine(target_of(NAME), drafter(), replace(trace, steps=steps))
        assert found.fault is not None and found.fault.stage == stage


@pytest.mark.parametrize("fed", [(1, 2, 3), (2, 3, 4), (0, 1, 2)])
def test_layers_of_a_deep_target(plugin, fed):
    """Neighbours differ by less than bfloat16's limit there."""
    generator = torch.Generator().manual_seed(0)

    def near(states: torch.Tensor, off: float) -> torch.Tensor:
        return states + off * torch.randn(24, 64, generator=generator)

    every = [near(torch.zeros(24, 64), 1.0)]
    for _ in range(4):
        every.append(near(every[-1], 0.06))
    layers = list(zip(*map(plugin.sketches, every), strict=True))
    recorded = [plugin.sketches(near(every[layer], 0.02)) for layer in fed]
    rows = [Row(0, i, states, (), (), ()) for i, states in enumerate(zip(*recorded, strict=True))]
    found = _states(Step(0, 0, rows), Reference((), (1, 2, 3), layers), STATES["bfloat16"], {})
    assert (found is None) == (fed == (1, 2, 3))
    assert found is None or (found.captured == fed and found.off is not None and found.off < STATES["bfloat16"])


def test_what_the_checkpoint_says_wrongly_is_corrected_there():
    for stage in STAGES:
        fault = Difference(stage, 0, 0, "", captured=(1, 2, 3) if stage == "states" else ())
        assert "--write OUT" in fix(fault, "vllm", stage, (1, 2, 3))
        assert "--write" not in fix(fault, "vllm", "", (0, 1, 2))
    fault = Difference("states", 0, 0, "", captured=(1, 2, 3))
    assert "--write" not in fix(fault, "vllm", "states", (0, 1, 2))  # the engine has ids of its own
    assert "eyas convert REFERENCE" in fix(fault, "vllm", "", (1, 2, 3))


def test_a_cache_that_was_overwritten(plugin, tmp_path):
    """The prompt is right; then the first slots are gone."""
    model = drafter()

    class Forgetful(Engine):
        def _slots(self, tokens, done, fed, states):
            slots = super()._slots(tokens, done, fed, states)
            if done:
                slots[1] = torch.cat((slots[1][:, :done].flip(1), slots[1][:, done:]), 1)
            return slots

    found = compared(Forgetful(model), model, plugin, tmp_path)
    assert found.fault is not None and found.fault.stage == "cache" and found.fault.place == 30


def test_harmless_offsets_are_notes(plugin, tmp_path):
    """Positions from 1 rotate alike; older SGLang puts drafted slots one further; embeddings are normed."""
    engine = Engine(drafter(), position=lambda place: place + 1, draft_position=1, embedding=lambda x: x * 32**0.5)
    found = compared(engine, drafter(), plugin, tmp_path)
    assert found.fault is None and len(found.notes) == 3 and "5.66 times as large" in found.notes[-1]


def test_the_plugins_sketches_are_ours(plugin):
    states = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    theirs, ours = plugin.sketches(states), _sketched(states).tolist()
    assert torch.allclose(torch.tensor(theirs), torch.tensor(ours), rtol=1e-4, atol=1e-4)
    apart = [distance(a, b) for a, b in pairwise(theirs)]
    true = [float((a - b).norm() / max(a.norm(), b.norm())) for a, b in pairwise(states)]
    assert all(0.5 * t < a < 2 * t for a, t in zip(apart, true, strict=True))


def test_no_draft_is_no_trace():
    about = {"call": "drafter", "engine": "vllm", "class": "X", "dtype": "float32", "config": {}}
    for lines in ([], [about]):
        with pytest.raises(EyasError, match="left no trace of a draft"):
            read(lines, [1, 2], [3])
