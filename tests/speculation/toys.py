"""Toy Markov targets, an independent account of the sampling settings, and a miniature of the speculative loop."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from eyas.core import DraftShape, SamplingParams
from eyas.speculation.sampling import TokenHistory, choose, needs_history, perturbed
from eyas.speculation.tree import TreeBuilder, path_tokens
from eyas.speculation.verify import accept

# Where ``fit`` puts a right distribution and a wrong one. With some fifty tests, one below 1e-3 is to be expected.
FITS, MISSES = 1e-4, 1e-6

VOCAB = 6
PROMPT = (0, 3)
STOP_IDS = (2,)
REDUCED = torch.tensor([0, 2, 3, 5])  # a drafter's vocabulary: tokens 1 and 4 can never be drafted

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 1.2},
    "presence": {"presence_penalty": -1.5},
    "bias": {"logit_bias": {1: 1.5, 4: -2.0, 5: -math.inf}},
    "min_tokens": {"min_tokens": 2, "max_tokens": 8},
    "all": {
        "temperature": 0.8,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.03,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": {2: 0.7},
        "min_tokens": 2,
    },
}


def sampling(name: str, seed: int = 0) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed} | SETTINGS[name])


def markov(seed: int, vocab: int = VOCAB, spread: float = 1.5) -> Tensor:
    """float32 [V, V]: the logits after each token."""
    return spread * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


TARGET = markov(1)
DRAFTER = TARGET + 0.7 * markov(2, spread=1.0)


def reference(logits: Sequence[float], params: SamplingParams, output: Sequence[int] = ()) -> list[float]:
    """The processed distribution, written a second time: token by token, in probabilities, with sorted lists."""
    x = [float(v) for v in logits]
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in STOP_IDS:
            x[token] = -math.inf
    for token in {*PROMPT, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    p = [math.exp((v - max(x)) / params.temperature) for v in x]
    p = [v if v >= params.min_p * max(p) else 0.0 for v in p]
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if params.top_k:
        order = order[: params.top_k]
    total, mass, kept = sum(p[token] for token in order), 0.0, []
    for token in order:
        if mass >= params.top_p:
            break
        kept.append(token)
        mass += p[token] / total
    norm = sum(p[token] for token in kept)
    return [p[token] / norm if token in kept else 0.0 for token in range(len(p))]


def joint(table: Tensor, params: SamplingParams) -> list[float]:
    """[V * V]: the exact distribution of the first two output tokens after PROMPT."""
    rows = table.tolist()
    first = reference(rows[PROMPT[-1]], params)
    return [pa * pb for a, pa in enumerate(first) for pb in reference(rows[a], params, [a])]


def joint_counts(pairs: Sequence[Sequence[int]], vocab: int = VOCAB) -> list[int]:
    counts = Counter(a * vocab + b for a, b in pairs)
    return [counts[i] for i in range(vocab * vocab)]


def fit(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Chi-squared p-value of the counts; 0 if something impossible happened. Rare cells are merged."""
    if any(count and probability <= 0 for count, probability in zip(counts, probabilities, strict=True)):
        return 0.0
    total = sum(counts)
    cells = sorted((total * p, count) for count, p in zip(counts, probabilities, strict=True))
    while cells[0][0] < 5:
        (expected, count), (next_expected, next_count), *cells = cells
        cells = [(expected + next_expected, count + next_count), *cells]
    expected_counts, observed = zip(*cells, strict=True)
    return float(stats.chisquare(observed, expected_counts, sum_check=False).pvalue)


def plain(table: Tensor, params: SamplingParams, count: int) -> list[int]:
    """Plain decoding: one row per step."""
    output: list[int] = []
    for index in range(count):
        history = TokenHistory.from_tokens(PROMPT, output, len(table)) if needs_history(params) else None
        row = table[[*PROMPT, *output][-1]][None]
        output.append(int(choose(row, params, [index], history=history, stop_ids=STOP_IDS)))
    return output


def speculate(
    table: Tensor,
    drafter: Tensor,
    params: SamplingParams,
    shape: DraftShape,
    count: int,
    token_ids: Tensor | None = None,
    per_path: bool = True,
) -> tuple[list[int], list[int]]:
    """Speculative decoding; also returns the number of tokens each step emitted. ``per_path`` False plants a bug."""
    output: list[int] = []
    emitted: list[int] = []
    while len(output) < count:
        history = TokenHistory.from_tokens(PROMPT, output, len(table)) if needs_history(params) else None
        draft = _draft(drafter, [*PROMPT, *output][-1], params, shape, len(output), history, token_ids)
        nodes = history.extended(path_tokens(draft)) if history and per_path else history
        indices = torch.tensor(draft.depths) + len(output)
        acceptance = accept(draft, choose(table[draft.tokens], params, indices, history=nodes, stop_ids=STOP_IDS))
        output += acceptance.tokens
        emitted.append(len(acceptance.tokens))
    return output[:count], emitted


def _draft(
    drafter: Tensor,
    root: int,
    params: SamplingParams,
    shape: DraftShape,
    index: int,
    history: TokenHistory | None,
    token_ids: Tensor | None,
) -> Any:
    columns = slice(None) if token_ids is None else token_ids
    builder = TreeBuilder(shape, root)
    tokens = torch.tensor([root])
    for depth in range(shape.num_steps):
        scores = perturbed(
            drafter[tokens][:, columns],
            params,
            [index + depth] * len(tokens),
            token_ids=token_ids,
            history=history.extended(builder.paths()) if history else None,
            stop_ids=STOP_IDS,
        )
        tokens = builder.expand(scores.log_softmax(-1), token_ids).tokens
    return builder.finish()


def mutant(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The function with a bug planted in its source; fails if the source no longer has the place."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{function.__name__} has changed: plant this bug anew"
    scope = dict(vars(inspect.getmodule(function)))
    exec(source.replace(old, new), scope)
    return scope[function.__name__]
