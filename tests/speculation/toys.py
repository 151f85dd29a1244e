"""Toy Markov targets, an independent account of the sampling settings, and a miniature of the speculative loop."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from eyas.core import Draft, DraftShape, SamplingParams
from eyas.speculation.sampling import Rows, TokenHistory, choose, draft_scores, needs_history, rows_of
from eyas.speculation.tree import TreeBuilder, chain
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


@dataclass
class Toy:
    """A running sequence, as far as choosing is concerned."""

    sampling: SamplingParams
    output_index: int = 0
    history: TokenHistory | None = None
    stop_ids: tuple[int, ...] = STOP_IDS


def toy(params: SamplingParams, output: Sequence[int], vocab: int = VOCAB) -> Toy:
    """A sequence that answers PROMPT and has emitted ``output``."""
    history = TokenHistory.from_tokens(PROMPT, output, vocab) if needs_history(params) else None
    return Toy(params, len(output), history)


def plain(table: Tensor, params: SamplingParams, count: int) -> list[int]:
    """Plain decoding: one sequence, one row per step."""
    output: list[int] = []
    for _ in range(count):
        root = torch.tensor([[[*PROMPT, *output][-1]]])
        output.append(int(choose(table[root], rows_of([toy(params, output, len(table))]), chain(root)).tokens))
    return output


def speculate(
    table: Tensor,
    drafter: Tensor,
    batch: Sequence[SamplingParams],
    shape: DraftShape,
    count: int,
    token_ids: Tensor | None = None,
    per_path: bool = True,
) -> tuple[list[list[int]], list[int]]:
    """Speculative decoding of a batch; also returns the number of tokens each step emitted, of all sequences.

    A sequence that has its tokens leaves an idle row behind. ``per_path`` False plants a bug.
    """
    outputs: list[list[int]] = [[] for _ in batch]
    emitted: list[int] = []
    while any(len(output) < count for output in outputs):
        sequences = [
            toy(params, output, len(table)) if len(output) < count else None
            for params, output in zip(batch, outputs, strict=True)
        ]
        rows = rows_of(sequences)
        roots = torch.tensor([[*PROMPT, *output][-1] for output in outputs])
        draft = _draft(drafter, roots, rows, shape, token_ids)
        judged = draft if per_path else Draft(torch.full_like(draft.tokens, -1), draft.parents, draft.depths)
        choice = choose(table[draft.tokens], rows, judged)
        assert choice.finite.all()
        acceptance = accept(draft, choice.tokens)
        for row, sequence in enumerate(sequences):
            if sequence is not None:
                outputs[row] += acceptance.tokens[row, : acceptance.counts[row]].tolist()
                emitted.append(int(acceptance.counts[row]))
    return [output[:count] for output in outputs], emitted


def _draft(drafter: Tensor, roots: Tensor, rows: Rows, shape: DraftShape, token_ids: Tensor | None) -> Draft:
    columns = slice(None) if token_ids is None else token_ids
    builder = TreeBuilder(shape, roots)
    tokens = roots[:, None]
    for depth in range(shape.num_steps):
        logits = drafter[tokens][..., columns]
        scores = draft_scores(logits, rows, depth, token_ids=token_ids, paths=builder.paths())
        tokens = builder.expand(scores, token_ids).tokens
    return builder.finish()


def mutant(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The function with a bug planted in its source; fails if the source no longer has the place."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{function.__name__} has changed: plant this bug anew"
    scope = dict(vars(inspect.getmodule(function)))
    exec(source.replace(old, new), scope)
    return scope[function.__name__]
