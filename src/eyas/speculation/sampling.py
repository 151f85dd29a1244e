"""From logits to a token: the processed distribution, its seed-coupled choice, and log-probabilities.

Everything here works row by row: a row is one output index of one request (a tree node in verification, a frontier
node in the drafter), and its result does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from eyas.core import NonFiniteLogitsError, RequestError, SamplingParams
from eyas.speculation.noise import gumbel

_NEVER = -math.inf
_SHORT_LOOKS = (1024, 8192)  # top-p: how many tokens to sort before falling back to the whole vocabulary


@dataclass(frozen=True)
class TokenHistory:
    """What penalties need to know about the tokens so far.

    ``prompt_mask`` is bool [V]; ``output_counts`` is float32 [V], or [N, V] where every row has its own history.
    Nothing is changed in place: the methods return a new history.
    """

    prompt_mask: Tensor
    output_counts: Tensor

    @classmethod
    def from_tokens(
        cls,
        prompt_ids: Sequence[int] | Tensor,
        output_ids: Sequence[int] | Tensor,
        vocab_size: int,
        device: torch.device | str | None = None,
    ) -> TokenHistory:
        """The history of one sequence. ``vocab_size`` is the width of the target's logits."""
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64, device=device)
        mask = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        mask[prompt] = True
        return cls(mask, torch.zeros(vocab_size, device=device)).with_output(output_ids)

    def with_output(self, token_ids: Sequence[int] | Tensor) -> TokenHistory:
        """The history after emitting ``token_ids`` as well (of a one-sequence history, counts [V])."""
        device = self.output_counts.device
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=device)
        ones = torch.ones(len(ids), device=device)
        return TokenHistory(self.prompt_mask, self.output_counts.index_add(0, ids, ones))

    def extended(self, path_tokens: Tensor) -> TokenHistory:
        """One history per tree node: this one (counts [V]) plus the tokens on the path from below the root to the node.

        Args:
            path_tokens: int64 [N, D], padded with -1, as ``tree.path_tokens`` and ``TreeBuilder.paths`` give them.

        Returns:
            A history with counts [N, V].
        """
        counts = self.output_counts.repeat(len(path_tokens), 1)
        counts.scatter_add_(1, path_tokens.clamp(min=0), (path_tokens >= 0).float())
        return TokenHistory(self.prompt_mask, counts)


def needs_history(params: SamplingParams) -> bool:
    """Whether ``process_logits`` needs a ``TokenHistory`` for these settings."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def process_logits(
    logits: Tensor,
    params: SamplingParams,
    *,
    output_indices: Tensor | Sequence[int],
    token_ids: Tensor | None = None,
    history: TokenHistory | None = None,
    stop_ids: Sequence[int] = (),
) -> Tensor:
    """Log-weights of the distribution that ``params`` make of the logits.

    The steps and their order are those of vLLM v1's sampler: logit bias, min_tokens, repetition, frequency and presence
    penalties, temperature, min-p, top-k, top-p. Greedy ends before the temperature: the rest cannot change the argmax.
    Tokens *tied* with the last one inside top-k or top-p stay too. That makes the result independent of a sort's whims
    and of the order of the vocabulary; vLLM's own implementations differ among themselves here.

    Args:
        logits: any float dtype [N, V'].
        output_indices: int64 [N], which output token each row decides (0 is the first generated one).
        token_ids: int64 [V'], the target ids of the columns (a drafter's reduced vocabulary). None: column = id.
        history: needed if ``needs_history(params)``; counts [V] or [N, V] over target ids.
        stop_ids: what must not be generated before ``min_tokens`` (end-of-sequence and stop tokens).

    Returns:
        float32 [N, V'], unnormalised, -inf where cut; may be ``logits`` itself if nothing applies.

    Raises:
        RequestError: ``logit_bias`` names a token outside the vocabulary.
        ValueError: penalties without a history.
    """
    x = logits.float()
    if params.logit_bias:
        x = x + _bias(params, x.shape[1], token_ids, x.device)
    if params.min_tokens and stop_ids:
        x = _without_early_stops(x, params.min_tokens, output_indices, token_ids, stop_ids)
    if needs_history(params):
        x = _penalised(x, params, token_ids, history)
    if params.greedy:
        return x
    if params.temperature != 1:
        # Relative to the maximum, so that a tiny temperature gives 0 and -inf instead of inf - inf.
        x = (x - x.amax(-1, keepdim=True)) / max(params.temperature, 1e-30)
    if params.min_p > 0:
        x = x.masked_fill(x < x.amax(-1, keepdim=True) + math.log(params.min_p), _NEVER)
    if 0 < params.top_k < x.shape[1]:
        x = x.masked_fill(x < x.topk(params.top_k).values[:, -1:], _NEVER)
    if params.top_p < 1:
        x = _top_p(x, params)
    return x


def perturbed(
    logits: Tensor,
    params: SamplingParams,
    output_indices: Tensor | Sequence[int],
    *,
    token_ids: Tensor | None = None,
    history: TokenHistory | None = None,
    stop_ids: Sequence[int] = (),
) -> Tensor:
    """Processed log-weights plus this request's Gumbel noise: their argmax is an exact sample (the Gumbel-max trick).

    Target and drafter both come through here, so a drafter whose distribution is near the target's mostly picks the
    same token (Daliri, Musco, Suresh 2024, "Coupling without communication"). Without noise when greedy.

    Arguments, errors and result as for ``process_logits``.
    """
    weights = process_logits(
        logits, params, output_indices=output_indices, token_ids=token_ids, history=history, stop_ids=stop_ids
    )
    if params.greedy:
        return weights
    if token_ids is None:
        token_ids = torch.arange(logits.shape[1], device=logits.device)
    indices = torch.as_tensor(output_indices, dtype=torch.int64, device=logits.device)
    if logits.device.type == "cpu" and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
        # Few tokens are left: only they need noise. (On a GPU, waiting for their number costs more than the noise.)
        left = (weights > _NEVER).any(0).nonzero()[:, 0]
        return weights.index_add(1, left, gumbel(params.seed, indices, token_ids[left]))
    return gumbel(params.seed, indices, token_ids).add_(weights)


def choose(
    logits: Tensor,
    params: SamplingParams,
    output_indices: Tensor | Sequence[int],
    *,
    token_ids: Tensor | None = None,
    history: TokenHistory | None = None,
    stop_ids: Sequence[int] = (),
) -> Tensor:
    """THE target's choice for each row, in plain decoding and in verification alike.

    Arguments as for ``process_logits``. Ties go to the first column, which is the lowest id unless ``token_ids`` says
    otherwise.

    Returns:
        int64 [N], target token ids.

    Raises:
        NonFiniteLogitsError: a row of the logits has NaN or +inf, or nothing but -inf.
        RequestError: the settings leave a row no token to choose; and as for ``process_logits``.
    """
    scores = perturbed(logits, params, output_indices, token_ids=token_ids, history=history, stop_ids=stop_ids)
    best, columns = scores.max(dim=-1)
    finite = torch.stack((logits.amax(-1).isfinite(), best.isfinite()))  # amax hands NaN on
    if not bool(finite.all()):
        raise _no_choice(finite, torch.as_tensor(output_indices).tolist())
    return columns if token_ids is None else token_ids[columns]


def logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """Log-probabilities to report, of the model's own distribution: before bias, penalties, temperature and cuts.

    That is vLLM's default (``raw_logprobs``).

    Args:
        logits: any float dtype [N, V].
        tokens: int64 [N], the emitted tokens.
        top_n: how many of the likeliest tokens to list as well.

    Returns:
        For each row the token's log-probability and ``top_n`` pairs (token id, log-probability), likeliest first.
    """
    logp = logits.float().log_softmax(-1)
    own = logp.gather(1, tokens.to(logp.device)[:, None])[:, 0].tolist()
    top = logp.topk(min(top_n, logp.shape[1]))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [(mine, list(zip(ids, values, strict=True))) for mine, (ids, values) in zip(own, pairs, strict=True)]


def _bias(params: SamplingParams, width: int, token_ids: Tensor | None, device: torch.device) -> Tensor:
    """float32 [V']: the logit bias of every column."""
    ids = list(params.logit_bias)
    wrong = [i for i in ids if i < 0 or (token_ids is None and i >= width)]
    if wrong:
        raise RequestError(f"logit_bias names token {wrong[0]}, which is not in the target's vocabulary")
    values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
    entries, columns = _columns(ids, token_ids, device)
    return torch.zeros(width, device=device).index_add_(0, columns, values[entries])


def _without_early_stops(
    x: Tensor,
    min_tokens: int,
    output_indices: Tensor | Sequence[int],
    token_ids: Tensor | None,
    stop_ids: Sequence[int],
) -> Tensor:
    early = torch.as_tensor(output_indices, device=x.device) < min_tokens
    if token_ids is None:  # an end-of-sequence id beyond the logits cannot be generated anyway
        stop_ids = [i for i in stop_ids if 0 <= i < x.shape[1]]
    stops = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
    stops[_columns(stop_ids, token_ids, x.device)[1]] = True
    return x.masked_fill(early[:, None] & stops, _NEVER)


def _columns(ids: Sequence[int], token_ids: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where ``ids`` are among the columns: pairs (position in ids, column), both int64 [M]; absent ids are left out."""
    wanted = torch.tensor(ids, dtype=torch.int64, device=device)
    if token_ids is None:
        return torch.arange(len(ids), device=device), wanted
    found = (wanted[:, None] == token_ids).nonzero()
    return found[:, 0], found[:, 1]


def _penalised(x: Tensor, params: SamplingParams, token_ids: Tensor | None, history: TokenHistory | None) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, as in HF and vLLM), then OpenAI's frequency and presence penalties."""
    if history is None:
        raise ValueError("these sampling parameters have penalties: process_logits needs a TokenHistory")
    prompt, counts = history.prompt_mask, history.output_counts
    if token_ids is not None:
        prompt, counts = prompt[token_ids], counts[..., token_ids]
    used = counts > 0
    if params.repetition_penalty != 1:
        lowered = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
        x = torch.where(used | prompt, lowered, x)
    return x - (params.frequency_penalty * counts + params.presence_penalty * used)


def _top_p(x: Tensor, params: SamplingParams) -> Tensor:
    """Keep the smallest set of likeliest tokens whose mass reaches top_p: those with less than top_p before them."""
    x = x.log_softmax(-1)
    # Sorting a whole vocabulary is the dearest step of all on a CPU, and a nucleus is rarely that large: look at the
    # top first. A short and a full look agree to the bit, since the sums over the sorted values have a common prefix.
    most = min(params.top_k or x.shape[1], x.shape[1])  # after top-k, all that is left ties with these
    short = [look for look in _SHORT_LOOKS if look < most] if x.device.type == "cpu" else []
    for look in (*short, most):
        values = x.topk(look).values
        before = pad(values.exp().cumsum(-1)[:, :-1], (1, 0))
        kept = (before < params.top_p).sum(-1, keepdim=True)
        if look == most or bool((kept < look).all()):
            break
    return x.masked_fill(x < values.gather(1, kept - 1), _NEVER)


def _no_choice(finite: Tensor, output_indices: Sequence[int]) -> NonFiniteLogitsError | RequestError:
    """``finite`` is bool [2, N]: are the row's logits usable, is there a usable score after processing?"""
    raw, processed = finite.tolist()
    if not all(raw):
        index = output_indices[raw.index(False)]
        return NonFiniteLogitsError(
            f"the target's logits for output token {index} contain NaN or inf or are all -inf, so no token can be "
            "chosen: the weights are damaged or the dtype overflows (try float32)"
        )
    index = output_indices[processed.index(False)]
    return RequestError(
        f"the sampling parameters leave no token to choose for output token {index}: "
        "logit_bias and min_tokens rule out or overflow every candidate"
    )
