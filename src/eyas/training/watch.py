"""Real acceptance while a drafter is trained. Losses keep falling after acceptance has peaked, so this decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.drafter.model import Eagle3Model
from eyas.engine.stats import AcceptanceStats
from eyas.target.adapter import HFTarget
from eyas.target.images import encode_chat
from eyas.training.acceptance import measure_acceptance, total
from eyas.training.dataset import Dataset
from eyas.training.heldout import HELDOUT
from eyas.training.vocabulary import Survey

HELD_OUT = "held out"  # the name of the prompts that come from the data


@dataclass(frozen=True)
class Evaluation:
    step: int
    acceptance_length: float  # over all prompts
    acceptance_rates: tuple[float, ...]  # by position
    by_task: dict[str, float]  # acceptance length


@dataclass(frozen=True)
class Watch:
    """Prompts by task, and how they are answered: greedy, with chains of ``steps``."""

    prompts: Mapping[str, Sequence[Sequence[int]]]
    steps: int
    max_tokens: int
    eos_ids: tuple[int, ...]

    def measure(self, target: HFTarget, drafter: Eagle3Model, step: int) -> Evaluation:
        kept: dict[str, AcceptanceStats] = {}
        for task, prompts in self.prompts.items():
            kept[task] = measure_acceptance(
                target, drafter, prompts, steps=self.steps, max_tokens=self.max_tokens, eos_ids=self.eos_ids
            )
        every = total(kept.values())
        lengths = {task: stats.acceptance_length for task, stats in kept.items()}
        return Evaluation(step, every.acceptance_length, tuple(every.acceptance_rates), lengths)


def hold_out(found: Survey, count: int, room: int | None) -> tuple[Survey, list[int]]:
    """The rows to train on, and the numbers of those that are not: at most one in ten, spread over the data.

    ``room``: tokens that a prompt may have, so that it can be answered; None: any number.
    """
    fitting = (found.prompts > 0) & (found.prompts <= (room if room is not None else 1 << 30))
    candidates = fitting.nonzero()[0]
    count = min(count, len(candidates), len(found.rows) // 10)
    chosen = candidates[[i * len(candidates) // count for i in range(count)]] if count else candidates[:0]
    kept = np.ones_like(fitting)
    kept[chosen] = False
    return found.only(kept), found.rows[chosen].tolist()


def prompts_for(
    data: Dataset, held_out: Sequence[int], tokenizer: Any, builtin: int, room: int | None
) -> dict[str, list[list[int]]]:
    """Prompts by task: the first turns of held-out rows, and ``builtin`` of the built-in ones, of each task as many.

    ``room``: tokens that a prompt may have; longer ones are left out.
    """
    rows = [data[number] for number in held_out]
    prompts = {HELD_OUT: [row.ids[: int(row.mask.argmax())].tolist() for row in rows]}
    for number, (task, texts) in enumerate(HELDOUT.items()):
        share = (builtin + len(HELDOUT) - 1 - number) // len(HELDOUT)
        prompts[task] = [encoded(text, tokenizer) for text in texts[:share]] if tokenizer is not None else []
    fitting = {task: [ids for ids in found if room is None or len(ids) <= room] for task, found in prompts.items()}
    return {task: found for task, found in fitting.items() if found}


def encoded(text: str, tokenizer: Any) -> list[int]:
    """As a chat would send it; as plain text to a target without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(text)["input_ids"])
    return encode_chat([{"role": "user", "content": text}], tokenizer, None)[0]
