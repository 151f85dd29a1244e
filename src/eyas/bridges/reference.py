"""What a drafter should be fed and should answer, step by step as an engine ran it: computed here, in one place.

The target reads prompt and answer in one pass, all of its layers' states are kept as sketches, and the drafter follows
as after prefill: slot i takes the state at place i and the embedding of token i + 1. Drafts go on with the tokens that
the engine drafted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from eyas.bridges.trace import Reference, Row, Step, Trace
from eyas.drafter.model import DraftStates, Eagle3Model
from eyas.target.adapter import HFTarget
from eyas.target.contract import Block

SUMS = 16  # of a sketch, as in the plugin
TOP = 256  # more than an engine's trace has: what it ranks among its first few may be further down here


class _Rows:
    """Keys and values of the true slots; each draft continues those before its root."""

    def __init__(self) -> None:
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == len(self.rows):
            self.rows.append((k, v))
        else:
            keys, values = self.rows[layer_idx]
            self.rows[layer_idx] = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
        return self.rows[layer_idx]

    def before(self, count: int) -> _Rows:
        cut = _Rows()
        cut.rows = [(k[:, :, :count], v[:, :, :count]) for k, v in self.rows]
        return cut


@torch.inference_mode()
def reference(target: HFTarget, model: Eagle3Model, recorded: Trace) -> Reference:
    """For the steps of ``recorded``, which the engine ran with this target and drafter."""
    model.bind(*target.get_embed_and_head())
    tokens = torch.tensor([recorded.tokens], device=target.device)
    every = _states(target, tokens[:, :-1])
    layers = torch.stack([_sketched(states) for states in every], dim=1).tolist()  # [places][layers + 1][sums + 1]
    aux = torch.cat([every[layer] for layer in model.aux_layer_ids], dim=-1)
    entering, embeds = model.fuse(aux[None]), model.embed(tokens[:, 1:])
    places, cache = torch.arange(tokens.shape[1] - 1, device=target.device)[None], _Rows()
    out = model(embeds, entering, places, cache=cache)
    true = _rows(model, recorded.tokens[1:], places[0].tolist(), embeds, entering, out)
    true = [replace(row, states=[layers[p][layer] for layer in model.aux_layer_ids]) for p, row in enumerate(true)]
    base = recorded.steps[0].rows[0].position - recorded.steps[0].place
    steps, carried, drafting = list[Step](), out.next_hidden, cache
    for step in recorded.steps:
        if step.depth == 0:
            steps.append(Step(step.place, 0, true[step.place : step.place + len(step.rows)]))
            tip = step.place + len(step.rows) - 1
            carried, drafting = out.next_hidden[:, tip : tip + 1], cache.before(tip + 1)
            continue
        # as it was run: a difference is said elsewhere, also where there is no such token or position
        token = min(max(step.rows[0].token, 0), model.config.vocab_size - 1)
        place = max(step.rows[0].position - base, 0)
        embed, entered = model.embed(tokens.new_tensor([[token]])), carried
        drafted = model(embed, entered, places.new_tensor([[place]]), cache=drafting)
        steps.append(Step(step.place, step.depth, _rows(model, [token], [place], embed, entered, drafted)))
        carried = drafted.next_hidden
    return Reference(steps, tuple(model.aux_layer_ids), layers)


def _states(target: HFTarget, tokens: torch.Tensor) -> Sequence[torch.Tensor]:
    """[T, H] entering each layer, and leaving the last one."""
    count = tokens.shape[1]
    cache = target.new_cache(count)
    cache.layout(1, count)
    target.set_eagle3_layers_to_capture(range(target.num_layers + 1))
    try:
        out = target.forward(Block(tokens, 0, tokens.new_zeros(1), count), cache)
    finally:
        target.set_eagle3_layers_to_capture(None)
    assert out.states is not None
    return out.states[0].chunk(target.num_layers + 1, dim=-1)


def _rows(
    model: Eagle3Model,
    tokens: Sequence[int],
    places: Sequence[int],
    embeds: torch.Tensor,
    entering: torch.Tensor,
    out: DraftStates,
) -> list[Row]:
    logits = model.logits(out.normed[0]).float()
    values, columns = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
    ids = model.draft_to_target[columns].tolist()
    tops = [tuple(zip(*both, strict=True)) for both in zip(ids, values.tolist(), strict=True)]
    sketched = [_sketched(part[0]).tolist() for part in (entering, embeds, out.normed)]
    parts = zip(tokens, places, *sketched, tops, logits.std(-1).tolist(), strict=True)
    return [Row(token, place, (), *rest) for token, place, *rest in parts]


def _sketched(states: torch.Tensor) -> torch.Tensor:
    """Norm and sums [T, 1 + SUMS] of states [T, width], as eyas_plugin.trace makes them."""
    values = states.detach().to("cpu", torch.float32)
    return torch.cat((values.norm(dim=-1, keepdim=True), values @ _signs(values.shape[-1]) / SUMS**0.5), dim=-1)


@functools.cache
def _signs(width: int) -> torch.Tensor:
    with torch.inference_mode(False):
        mixed = torch.arange(width * SUMS) * 2654435761 & 0xFFFFFFFF
        mixed = (mixed ^ mixed >> 16) * 2246822519 & 0xFFFFFFFF
        return (1 - 2 * ((mixed ^ mixed >> 13) & 1)).float().view(width, SUMS)
