"""A tiny drafter that is right now and then: taught a few answers of a tiny target by a plain loop."""

from __future__ import annotations

from functools import cache

import torch
from engine.harness import DRAFTERS, target_of, truth

from eyas.core import SamplingParams
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import untrained
from eyas.training.acceptance import Answered
from eyas.training.features import FrozenTarget
from eyas.training.recording import batch_of
from eyas.training.unroll import unroll

NAME = "llama"
LENGTHS = (12, 17, 30, 41)
PROMPTS = [truth(NAME, length=length).prompt for length in LENGTHS]


def answered(prompt: list[int], tokens: list[int]) -> Answered:
    return Answered(prompt, tokens, SamplingParams(seed=0))


@cache
def taught(kind: str = "standard", passes: int = 25) -> Eagle3Drafter:
    """What it was taught are the greedy answers to all PROMPTS but the last one."""
    target = target_of(NAME)
    model = untrained(target.hidden_size, target.num_layers, target.vocab_size, **DRAFTERS[kind])
    if model.config.draft_vocab_size < target.vocab_size:
        model.draft_to_target.copy_(torch.arange(0, 3 * model.config.draft_vocab_size, 3))
    model.bind(*target.get_embed_and_head())
    frozen = FrozenTarget(target, model.aux_layer_ids, model.draft_to_target)
    told = [truth(NAME, length=length) for length in LENGTHS[:-1]]
    lessons = [frozen(batch_of(answered(t.prompt, t.tokens))) for t in told]
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(passes):
        for features in lessons:
            loss = torch.zeros(())
            for guesses in unroll(model, features, 4):
                wanted = features.labels.best[guesses.labels]
                loss = loss + torch.nn.functional.cross_entropy(model.logits(guesses.normed), wanted, ignore_index=-1)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return Eagle3Drafter(model.eval())
