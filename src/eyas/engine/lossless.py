"""Proof on one's own prompts: the same tokens with and without speculation, and what a difference means.

In fp32 any difference is a bug. In lower precision a verify pass over several tokens may round differently from a pass
over one; what may differ then is exactly a near-tie, and this is its definition (vocabulary: near-tie) as code.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from eyas.core import Request, SamplingParams
from eyas.engine.llm import LLM, Completion, Prompt
from eyas.speculation.sampling import TokenHistory, needs_history, perturbed, process_logits
from eyas.target.adapter import HFTarget
from eyas.target.contract import Block


@dataclass(frozen=True)
class Divergence:
    """Where two decodings part: ``tokens`` are plain's and speculation's at output ``index``.

    ``error`` is the largest difference between the target's low-precision and fp32 logits at this place, stretched as
    repetition penalty and temperature stretch logits. The divergence is a near-tie when errors of that size explain
    both choices: in fp32 both tokens are less than twice the error below the best one (a third may stand between them:
    bf16 has one value for all logits within 0.06 of 20), and neither is cut by top-k, top-p or min-p farther from its
    border than the error moves it.
    """

    index: int
    tokens: tuple[int, int]
    gap: float  # between their scores in fp32: logits, with temperature and noise where sampled
    error: float
    near_tie: bool


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

    def compare(
        self, prompt: Prompt, sampling: SamplingParams, images: Any = None, *, speculative_first: bool = False
    ) -> Comparison:
        """Decodes ``prompt`` both ways. Whoever compares speeds over many prompts alternates which way is first."""
        request = self.llm.request(prompt, sampling, images)
        ways = [replace(request, speculate=False), request]
        if speculative_first:
            speculative, plain = (self.llm.complete(way) for way in reversed(ways))
        else:
            plain, speculative = (self.llm.complete(way) for way in ways)
        divergences = []
        ours, theirs = plain.token_ids, speculative.token_ids
        while (index := first_difference(ours, theirs)) is not None:
            divergence = self.judge(request, ours, theirs, index)
            divergences.append(divergence)
            if not divergence.near_tie or index + 1 >= len(ours):
                break
            forced = ours[: index + 1]
            theirs = forced + self.llm.complete(replace(request, output_ids=forced)).token_ids
        return Comparison(plain, speculative, tuple(divergences))

    def judge(self, request: Request, ours: list[int], theirs: list[int], index: int) -> Divergence:
        a, b = (tokens[index] if index < len(tokens) else -1 for tokens in (ours, theirs))
        low, exact = (next_logits(target, request, ours[:index]) for target in (self.llm.target, self._fp32))
        sampling = request.sampling
        stretch = max(sampling.repetition_penalty, 1 / sampling.repetition_penalty) / (sampling.temperature or 1.0)
        error = float((low - exact).abs().max()) * stretch
        history = None
        if needs_history(sampling):
            history = TokenHistory.from_tokens(request.prompt_ids, ours[:index], exact.shape[-1], exact.device)
        uncut = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
        context: Any = {"history": history, "stop_ids": self.llm.engine.stop_ids(sampling), "output_indices": [index]}
        weights = process_logits(exact, uncut, **context)[0]
        scores = perturbed(exact, uncut, **context)[0]
        gap = float((scores[a] - scores[b]).abs())
        return Divergence(index, (a, b), gap, error, explained(weights, scores, (a, b), sampling, error))

    @cached_property
    def _fp32(self) -> HFTarget:
        return HFTarget(copy.deepcopy(self.llm.target.model).float())


def explained(
    weights: torch.Tensor, scores: torch.Tensor, tokens: tuple[int, int], sampling: SamplingParams, error: float
) -> bool:
    """Whether errors of up to ``error`` in the log-weights [V] explain that both tokens were chosen.

    ``scores`` [V] are the log-weights with noise; neither has been cut by top-k, top-p or min-p.
    """
    if min(tokens) < 0:  # one answer ended where the other went on
        return False
    surely, possibly = borders(weights, sampling, error)
    if not all(possibly[token] for token in tokens):
        return False
    best = scores.masked_fill(~surely, -torch.inf).max()
    return all(bool(scores[token] > best - 2 * error) for token in tokens)


def borders(weights: torch.Tensor, sampling: SamplingParams, error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens [V] top-k, top-p and min-p keep whatever the errors (each up to ``error``), and which under some.

    A token's rank and the mass before it change most when it moves by the error one way and all others the other way.
    Top-p counts the mass of what min-p and top-k leave.
    """
    surely = torch.ones_like(weights, dtype=torch.bool)
    possibly = surely.clone()
    if sampling.greedy:
        return surely, possibly
    order = weights.argsort(descending=True)
    probs = weights.double().softmax(-1)
    sums = torch.nn.functional.pad(probs[order].cumsum(0), (1, 0))
    highest_other = torch.where(weights == weights.max(), weights[order[1:2]], weights.max())
    for sign, kept in ((1, surely), (-1, possibly)):  # the worst and the best case for the token itself
        shift = sign * 2 * error
        itself = int(sign > 0)
        # those before it: everything that could overtake it (and itself), or everything that it could not overtake
        before = torch.searchsorted(-weights[order], -(weights - shift), right=sign > 0)
        if sampling.min_p > 0:
            kept &= weights >= highest_other + math.log(sampling.min_p) + shift
        if sampling.top_k:
            kept &= before - itself < sampling.top_k
        if sampling.top_p < 1:
            left = sums[int(kept.sum())]  # what is kept so far is the head of the order
            after = (left - sums[before] - (1 - itself) * probs).clamp(min=0)
            odds = (sums[before] - itself * probs) * math.exp(shift) / (probs + after).clamp(min=1e-12)
            kept &= odds < sampling.top_p * (1 + odds)
    return surely, possibly


@torch.no_grad()
def next_logits(target: HFTarget, request: Request, output_ids: list[int]) -> torch.Tensor:
    """float32 logits [1, V] after the request's prompt and ``output_ids``: read plainly, without any draft."""
    cache = target.new_cache(len(request.prompt_ids) + len(output_ids))
    blocks = [torch.tensor([ids], device=target.device) for ids in (list(request.prompt_ids), output_ids) if ids]
    start = delta = 0
    for tokens in blocks:
        images = None if start else request.images
        places, deltas = (torch.tensor([n], device=target.device) for n in (start, delta))
        block = Block(tokens, 0, places, start + tokens.shape[1], deltas)
        ends = torch.tensor([tokens.shape[1] - 1], device=target.device)
        output = target.forward(block, cache, ends=ends, images=images)
        start, delta = start + tokens.shape[1], delta + output.rope_delta
    return output.logits[:, -1].float()


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Where two token lists part; an answer that ends early parts at its end."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))
