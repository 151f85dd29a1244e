"""The loop one would write first: transformers' model, padded rows, dense masks, autograd.

    training_plain.py TASK

The drafter is Eyas's own module, started as ``eyas train`` starts it, so that only the loop differs.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from training_protocol import Task, Update, serve
from transformers import AutoModelForCausalLM

from eyas.target.adapter import HFTarget
from eyas.training.start import new


class Growing:
    """Keys and values of all unroll steps so far."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in self.layers:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        return k, v


class Loop:
    def __init__(self, task: Task, dtype: torch.dtype):
        self.task, self.dtype = task, dtype
        self.target = AutoModelForCausalLM.from_pretrained(task.target, dtype=torch.bfloat16).eval()
        self.drafter = new(HFTarget(self.target), np.array(task.draft_ids), aux_layer_ids=tuple(task.layer_ids)).train()
        self.ids = torch.tensor(task.draft_ids)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def update(self, number: int) -> float:
        rows = self.task.batches[number]
        width = max(len(ids) for ids, _ in rows)
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        there = torch.tensor([[True] * len(ids) + [False] * (width - len(ids)) for ids, _ in rows])
        wrote = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in rows])
        with torch.no_grad():
            out = self.target(tokens, attention_mask=there, output_hidden_states=True, use_cache=False)
            states = torch.cat([out.hidden_states[layer] for layer in self.task.layer_ids], dim=-1)
            probs = out.logits.float().softmax(-1)[..., self.ids]
        with torch.autocast("cpu", self.dtype) if self.dtype != torch.float32 else nullcontext():
            loss = self.loss(tokens, there, wrote, states.float(), probs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def loss(self, tokens: torch.Tensor, there: torch.Tensor, wrote: torch.Tensor, states: Any, probs: Any) -> Any:
        """Every place drafts at every step; what was not asked for is masked in the loss."""
        width = tokens.shape[1]
        places = torch.arange(width).expand(len(tokens), -1)
        seen = (there[:, None, :] & torch.ones(width, width, dtype=torch.bool).tril())[:, None]
        seen = seen | torch.eye(width, dtype=torch.bool)
        own = torch.eye(width, dtype=torch.bool).expand(len(tokens), 1, -1, -1)
        hidden, cache, total = self.drafter.fuse(states), Growing(), torch.zeros(())
        asked, weights = torch.ones_like(wrote), [0.8**step for step in range(self.task.unroll)]
        for step, weight in enumerate(weights):
            embeds = self.drafter.embed(ahead(tokens, 1 + step))
            hidden, normed = self.drafter(embeds, hidden, places + step, seen, cache)
            scores = self.drafter.logits(normed).float().log_softmax(-1)
            each = -(ahead(probs, 1 + step) * scores).sum(-1)
            # all of a draft was written by the target: its root and what it is to guess
            asked = asked & ahead(wrote, 1 + step) & ahead(wrote, 2 + step)
            total = total + weight * (each * asked).sum() / asked.sum().clamp(min=1)
            seen = torch.cat((seen, own), dim=-1)
        return total / sum(weights)


def ahead(x: torch.Tensor, places: int) -> torch.Tensor:
    """What stands so many places later; zeros behind the end. x: [B, T] or [B, T, D]."""
    pad = (0, 0, 0, places) if x.dim() == 3 else (0, places)
    return F.pad(x, pad)[:, places:]


def load(task: Task) -> tuple[Update, dict[str, Any]]:
    torch.set_num_threads(task.threads)
    can = torch.cpu.get_capabilities()
    dtype = torch.bfloat16 if can.get("avx512_bf16") or can.get("amx_bf16") else torch.float32
    return Loop(task, dtype).update, {"precision": str(dtype)}


if __name__ == "__main__":
    task = Task.read(sys.argv[1])
    serve(lambda: load(task))
