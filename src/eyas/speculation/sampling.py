"""From logits to a token: the processed distribution, its seed-coupled choice, and log-probabilities.

Everything here works row by row: a row is one output index of one request (a tree node in verification, a frontier
node in the drafter), and its result does not depend on the other rows. Sequences of a batch that share their settings
form a group, whose rows go through together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from eyas.core import Draft, EyasError, NonFiniteLogitsError, RequestError, SamplingParams
from eyas.speculation.noise import gumbel
from eyas.speculation.top import largest
from eyas.speculation.tree import path_tokens

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


class Chooser(Protocol):
    """What choosing needs to know of a running sequence."""

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def output_index(self) -> int:
        """How many tokens were emitted: the index of the next one, which keys its noise."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def history(self) -> TokenHistory | None:
        """Token counts for penalties; None where no penalty needs them."""


@dataclass(frozen=True)
class Group:
    """Sequences of a batch that ``process_logits`` treats alike."""

    params: SamplingParams  # one member's: all agree in what process_logits reads (not in seed, max_tokens, stop, ...)
    members: Tensor  # int64 [n], rows of the batch
    everyone: bool  # the members are all rows of the batch, in order: nothing needs to be gathered
    indices: Tensor  # int64 [n], the output index of each one's next token
    seeds: tuple[int, ...]  # [n]
    stop_ids: tuple[int, ...]
    history: TokenHistory | None  # counts [V]; with one, the group is a single sequence
    constrained: Tensor | None  # int64 [n], the members' places among the C constrained sequences of the batch


@dataclass(frozen=True)
class Rows:
    """How each sequence of a batch chooses its tokens. A row that is in no group is idle."""

    groups: tuple[Group, ...]
    count: int  # B


@dataclass(frozen=True)
class Choice:
    """The target's tokens for B sequences; whatever in idle rows."""

    tokens: Tensor  # int64 [B, N], the token after each node; -1 where none can be chosen
    finite: Tensor  # bool [B, N], the logits were usable; if so and tokens is -1, the settings left nothing to choose


def rows_of(sequences: Sequence[Chooser | None], device: torch.device | str | None = None) -> Rows:
    """The groups of a batch, each with its tensors on ``device``.

    Args:
        sequences: [B]; None is an idle row.
    """
    alike: dict[Any, list[int]] = {}
    constrained: list[int] = []
    for row, sequence in enumerate(sequences):
        if sequence is None:
            continue
        params = sequence.sampling
        if params.structured_outputs is not None:
            constrained.append(row)
        key: Any = _settings(params)
        if params.min_tokens:  # nothing else reads the stop ids
            key = (key, sequence.stop_ids)
        if sequence.history is not None:
            key = row
        alike.setdefault(key, []).append(row)
    return Rows(tuple([_group(sequences, rows, constrained, device) for rows in alike.values()]), len(sequences))


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
    allowed: Tensor | None = None,
) -> Tensor:
    """Log-weights of the distribution that ``params`` make of the logits.

    The steps and their order are those of vLLM v1's sampler: logit bias, the constraint, min_tokens, repetition,
    frequency and presence penalties, temperature, min-p, top-k, top-p. Greedy ends before the temperature: the rest
    cannot change the argmax.
    Tokens *tied* with the last one inside top-k or top-p stay too. That makes the result independent of a sort's whims
    and of the order of the vocabulary; vLLM's own implementations differ among themselves here.

    Args:
        logits: any float dtype [N, V'].
        output_indices: int64 [N], which output token each row decides (0 is the first generated one).
        token_ids: int64 [V'], the target ids of the columns (a drafter's reduced vocabulary). None: column = id.
        history: needed if ``needs_history(params)``; counts [V] or [N, V] over target ids.
        stop_ids: what must not be generated before ``min_tokens`` (end-of-sequence and stop tokens). Ids without a
            column are passed over, here and in the bias (``check_bias`` refuses those outside the vocabulary).
        allowed: bool [N, V'], what a constraint lets follow; None: everything. Where that is nothing but stop tokens,
            the answer is complete, and ``min_tokens`` does not count.

    Returns:
        float32 [N, V'], unnormalised, -inf where cut; may be ``logits`` itself if nothing applies.

    Raises:
        ValueError: penalties without a history.
    """
    x = logits.float()
    if params.logit_bias:
        x = x + _bias(params, x.shape[1], token_ids, x.device)
    if allowed is not None:  # behind the bias, which may be infinite
        x = x.masked_fill(~allowed, _NEVER)
    if params.min_tokens and stop_ids:
        x = _without_early_stops(x, params.min_tokens, output_indices, token_ids, stop_ids, allowed)
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
    seeds: Sequence[int] | None = None,
    token_ids: Tensor | None = None,
    history: TokenHistory | None = None,
    stop_ids: Sequence[int] = (),
    allowed: Tensor | None = None,
) -> Tensor:
    """Processed log-weights plus each request's Gumbel noise: their argmax is an exact sample (the Gumbel-max trick).

    Target and drafter both come through here, so a drafter whose distribution is near the target's mostly picks the
    same token (Daliri, Musco, Suresh 2024, "Coupling without communication"). Without noise when greedy.

    ``seeds`` are n ints, each for N / n rows in succession; None: that of ``params`` for all. The other arguments,
    errors and the result are as for ``process_logits``.
    """
    weights = process_logits(
        logits,
        params,
        output_indices=output_indices,
        token_ids=token_ids,
        history=history,
        stop_ids=stop_ids,
        allowed=allowed,
    )
    if params.greedy:
        return weights
    if seeds is None:
        seeds = (params.seed,)
    if token_ids is None:
        token_ids = torch.arange(logits.shape[1], device=logits.device)
    indices = torch.as_tensor(output_indices, dtype=torch.int64, device=logits.device)
    cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or allowed is not None
    if cut and logits.device.type == "cpu":
        # Few tokens are left: only they need noise. (On a GPU, waiting for their number costs more than the noise.)
        left = (weights > _NEVER).any(0).nonzero()[:, 0]
        return weights.index_add(1, left, gumbel(seeds, indices, token_ids[left]))
    return gumbel(seeds, indices, token_ids).add_(weights)


def choose(logits: Tensor, rows: Rows, draft: Draft, allowed: Tensor | None = None) -> Choice:
    """THE target's choice after each node, in plain decoding (a draft of nothing but the root) and verification alike.

    Ties go to the lowest token id. It never raises for what the tensors hold and never waits for a GPU: ``Choice`` says
    where something went wrong, and ``no_choice`` what to tell the caller.

    Args:
        logits: any float dtype [B, N, V].
        rows: of the same B sequences.
        draft: [B, N], each rooted at the token before its sequence's next one.
        allowed: int32 [C, N, W], for the C constrained sequences, in the order of their rows, a bit for each token
            that may follow a node (bit ``v % 32`` of word ``v // 32``). Needed where there are any.
    """
    best, tokens = largest(logits)  # of all rows: that is cheaper than to gather some
    finite = best.isfinite()
    tokens = tokens.where(finite, -1)
    others = [group for group in rows.groups if not _takes_logits_as_they_are(group.params)]
    if others:
        depths = torch.arange(logits.shape[1], device=logits.device) if draft.depths is None else draft.depths
        depths = depths.expand(logits.shape[:2])
        paths = path_tokens(draft) if any(group.history is not None for group in others) else None
    for group in others:
        best, own = largest(_scores(logits, group, depths, paths=paths, allowed=allowed))
        tokens[group.members] = own.where(finite[group.members] & best.isfinite(), -1)
    return Choice(tokens, finite)


def draft_scores(
    logits: Tensor,
    rows: Rows,
    depth: int,
    *,
    token_ids: Tensor | None = None,
    paths: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """What a drafter ranks its tokens by: its own ``perturbed`` log-weights, with the noise that the target will use.

    Args:
        logits: any float dtype [B, F, V'], the drafter's, after F nodes of one depth.
        rows: of the same B sequences.
        depth: of these nodes; the root's is 0.
        token_ids: int64 [V'], the target ids of the columns. None: column = id.
        paths: int64 [B, F, depth], the tokens from below the root to each node (``TreeBuilder.paths``), for penalties.
            None: they are not counted.
        allowed: int32 [C, F, W] as for ``choose``, over target ids.

    Returns:
        float32 [B, F, V'], not normalised, -inf where cut; may be ``logits`` itself if nothing applies.
    """
    others = [group for group in rows.groups if not _takes_logits_as_they_are(group.params)]
    if not others:
        return logits.float()
    depths = torch.full(logits.shape[:2], depth, device=logits.device)
    if others[0].everyone:
        return _scores(logits, others[0], depths, token_ids, paths, allowed)
    scores = logits.to(torch.float32, copy=True)
    for group in others:
        scores[group.members] = _scores(logits, group, depths, token_ids, paths, allowed)
    return scores


def no_choice(finite: bool, index: int) -> EyasError:
    """The error for output token ``index`` where ``Choice.tokens`` is -1; ``finite`` is what ``Choice`` says there."""
    if not finite:
        return NonFiniteLogitsError(
            f"the target's logits for output token {index} contain NaN or inf or are all -inf, so no token can be "
            "chosen: the weights are damaged or the dtype overflows (try float32)"
        )
    return RequestError(
        f"the sampling parameters leave no token to choose for output token {index}: "
        "logit_bias, min_tokens and structured_outputs rule out or overflow every candidate"
    )


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError if ``logit_bias`` names a token outside the target's vocabulary."""
    wrong = [i for i in params.logit_bias if not 0 <= i < vocab_size]
    if wrong:
        raise RequestError(f"logit_bias names token {wrong[0]}, which is not in the target's vocabulary")


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


def _settings(params: SamplingParams) -> tuple[Any, ...]:
    """All that ``process_logits`` reads: equal for two sequences whose logits can be processed together."""
    # Remembered where functools.cached_property would put it: every step asks every sequence, and params are frozen.
    settings = params.__dict__.get("_settings")
    if settings is None:
        cuts = () if params.greedy else (params.temperature, params.min_p, params.top_k, params.top_p)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        constrained = params.structured_outputs is not None  # by what is each one's own affair
        settings = (cuts, penalties, params.min_tokens, tuple(sorted(params.logit_bias.items())), constrained)
        params.__dict__["_settings"] = settings
    return settings


def _group(
    sequences: Sequence[Chooser | None], rows: list[int], constrained: list[int], device: torch.device | str | None
) -> Group:
    members = [sequence for row in rows if (sequence := sequences[row]) is not None]
    everyone = len(rows) == len(sequences)
    places = [constrained.index(row) for row in rows] if members[0].sampling.structured_outputs is not None else None
    return Group(
        params=members[0].sampling,
        members=torch.arange(len(rows), device=device) if everyone else torch.tensor(rows, device=device),
        everyone=everyone,
        indices=torch.tensor([member.output_index for member in members], device=device),
        seeds=tuple([member.sampling.seed for member in members]),
        stop_ids=members[0].stop_ids,
        history=members[0].history,
        constrained=None if places is None else torch.tensor(places, device=device),
    )


def _takes_logits_as_they_are(params: SamplingParams) -> bool:
    """Whether ``perturbed`` changes nothing."""
    if not params.greedy or params.structured_outputs is not None:
        return False
    return not (params.logit_bias or params.min_tokens or needs_history(params))


def _scores(
    logits: Tensor,
    group: Group,
    depths: Tensor,
    token_ids: Tensor | None = None,
    paths: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """float32 [n, N, V']: ``perturbed`` for the members of a group. All other tensors are the whole batch's."""
    if not group.everyone:
        logits, depths = logits[group.members], depths[group.members]
    history = group.history
    if history is not None and paths is not None:
        history = history.extended(paths[group.members][0])
    own = None
    if group.constrained is not None:
        if allowed is None:
            raise ValueError("there are constrained sequences, and nothing says what they allow")
        own = _unpacked(allowed[group.constrained].flatten(0, 1), logits.shape[-1], token_ids)
    scores = perturbed(
        logits.flatten(0, 1),
        group.params,
        (group.indices[:, None] + depths).flatten(),
        seeds=group.seeds,
        token_ids=token_ids,
        history=history,
        stop_ids=group.stop_ids,
        allowed=own,
    )
    return scores.view(logits.shape)


def _unpacked(bits: Tensor, width: int, token_ids: Tensor | None) -> Tensor:
    """bool [N, V'] of int32 [N, W]: the bits of the tokens that the ``width`` columns stand for."""
    if token_ids is None:
        every = (bits[:, :, None] >> torch.arange(32, device=bits.device, dtype=bits.dtype)) & 1
        return every.flatten(1)[:, :width].bool()
    return ((bits[:, token_ids // 32] >> (token_ids % 32).to(bits.dtype)) & 1).bool()


def _bias(params: SamplingParams, width: int, token_ids: Tensor | None, device: torch.device) -> Tensor:
    """float32 [V']: the logit bias of every column."""
    bias = [(i, value) for i, value in params.logit_bias.items() if token_ids is not None or 0 <= i < width]
    ids = _on(device, [i for i, _ in bias], torch.int64)
    values = _on(device, [value for _, value in bias], torch.float32)
    if token_ids is None:
        return torch.zeros(width, device=device).index_copy_(0, ids, values)
    return torch.where(ids[:, None] == token_ids, values[:, None], 0).sum(0)  # at most one of each column is not 0


def _without_early_stops(
    x: Tensor,
    min_tokens: int,
    output_indices: Tensor | Sequence[int],
    token_ids: Tensor | None,
    stop_ids: Sequence[int],
    allowed: Tensor | None,
) -> Tensor:
    early = torch.as_tensor(output_indices, device=x.device) < min_tokens
    columns = torch.arange(x.shape[1], device=x.device) if token_ids is None else token_ids
    stops = (_on(x.device, stop_ids, torch.int64)[:, None] == columns).any(0)
    if allowed is not None:
        early = early & (allowed & ~stops).any(-1)
    return x.masked_fill(early[:, None] & stops, _NEVER)


def _on(device: torch.device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """A tensor on the device without waiting for what runs there."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


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
    # top first, and further only for rows that need it. A short and a full look agree to the bit, since the sums over
    # the sorted values have a common prefix.
    most = min(params.top_k or x.shape[1], x.shape[1])  # after top-k, all that is left ties with these
    looks = [*(look for look in _SHORT_LOOKS if look < most and x.device.type == "cpu"), most]
    last, kept = _nucleus(x, params.top_p, looks[0])
    for look, wider in pairwise(looks):
        rows = (kept >= look).nonzero()[:, 0]
        if len(rows):
            last[rows], kept[rows] = _nucleus(x[rows], params.top_p, wider)
    return x.masked_fill(x < last[:, None], _NEVER)


def _nucleus(logp: Tensor, top_p: float, look: int) -> tuple[Tensor, Tensor]:
    """Among the ``look`` likeliest: the log-probability of the last token kept, float32 [N], and how many are kept."""
    values = logp.topk(look).values
    before = pad(values.exp().cumsum(-1)[:, :-1], (1, 0))
    kept = (before < top_p).sum(-1)
    return values.gather(1, kept[:, None] - 1)[:, 0], kept
