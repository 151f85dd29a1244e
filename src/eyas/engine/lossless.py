"""Proof on one's own prompts: the same tokens with and without speculation, and what a difference means.

In fp32 any difference is a bug. In lower precision a verify pass over several tokens may round differently from a pass
over one; what may differ then is exactly a near-tie, and this is its definition (vocabulary: near-tie) as code.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from eyas.core import Request, SamplingParams
from eyas.engine.llm import LLM, Completion, Prompt
from eyas.speculation.sampling import TokenHistory, needs_history, perturbed


@dataclass(frozen=True)
class Divergence:
    """Where two decodings part: ``tokens`` are plain's and speculation's at output ``index``."""

    index: int
    tokens: tuple[int, int]
    gap: float  # between the two in fp32, in units of log-probability; infinite where they are not its first two
    allowed: float  # twice the largest low-precision logit error at this place

    @property
    def near_tie(self) -> bool:
        return self.gap < self.allowed


@dataclass(frozen=True)
class Comparison:
    """One prompt decoded both ways. After a near-tie, speculation went on from plain's tokens."""

    plain: Completion
    speculative: Completion
    divergences: tuple[Divergence, ...]

    @property
    def equal(self) -> bool:
        return not self.divergences

    @property
    def lossless(self) -> bool:
        return all(divergence.near_tie for divergence in self.divergences)

    @property
    def speedup(self) -> float:
        """Decoding speed with speculation over without; 0 where the answers are too short to tell."""
        plain = self.plain.tokens_per_second
        return self.speculative.tokens_per_second / plain if plain else 0.0


class Comparer:
    """Decodes with and without speculation. Keeps an fp32 copy of the target from the first difference on."""

    def __init__(self, llm: LLM):
        self.llm = llm

    def compare(self, prompt: Prompt, sampling: SamplingParams, images: Any = None) -> Comparison:
        request = self.llm.request(prompt, sampling, images)
        plain = self.llm.complete(replace(request, speculate=False))
        speculative = self.llm.complete(request)
        divergences = []
        ours, theirs = plain.token_ids, speculative.token_ids
        while (index := first_difference(ours, theirs)) is not None:
            divergence = self._judge(request, ours, theirs, index)
            divergences.append(divergence)
            if not divergence.near_tie or index + 1 >= len(ours):
                break
            forced = ours[: index + 1]
            theirs = forced + self.llm.complete(replace(request, output_ids=forced)).token_ids
        return Comparison(plain, speculative, tuple(divergences))

    def _judge(self, request: Request, ours: list[int], theirs: list[int], index: int) -> Divergence:
        a, b = (tokens[index] if index < len(tokens) else -1 for tokens in (ours, theirs))
        prefix = torch.tensor([[*request.prompt_ids, *ours[:index]]], device=self.llm.target.device)
        low, exact = (last_logits(model, prefix, request.images) for model in (self.llm.target.model, self._fp32))
        sampling = request.sampling
        error = float((low - exact).abs().max()) / (sampling.temperature or 1.0)
        history = None
        if needs_history(sampling):
            history = TokenHistory.from_tokens(request.prompt_ids, ours[:index], exact.shape[-1], exact.device)
        stop_ids = self.llm.engine.stop_ids(sampling)
        scores = perturbed(exact, sampling, [index], history=history, stop_ids=stop_ids)[0]
        best = scores.topk(2)
        gap = float(best.values[0] - best.values[1]) if {a, b} == set(best.indices.tolist()) else float("inf")
        return Divergence(index, (a, b), gap, 2 * error)

    @cached_property
    def _fp32(self) -> Any:
        return copy.deepcopy(self.llm.target.model).float()


@torch.no_grad()
def last_logits(model: Any, prefix: torch.Tensor, images: Any) -> torch.Tensor:
    """A plain forward pass over ``prefix`` [1, T], without cache or adapter: float32 logits [1, V] behind it."""
    pixels = {}
    for name, value in (images or {}).items():
        if name.endswith("token_type_ids"):  # one entry a token: text behind the prompt
            value = torch.nn.functional.pad(value, (0, prefix.shape[1] - value.shape[1]))
        pixels[name] = value.to(model.dtype) if value.is_floating_point() else value
    return model(input_ids=prefix, use_cache=False, **pixels).logits[:, -1].float()


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Where two token lists part; an answer that ends early parts at its end."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))
