"""What the target makes of a draft: THE accept rule, and the classic p/q rule as a reference."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.core import Acceptance, Draft


def accept(draft: Draft, chosen: Tensor) -> Acceptance:
    """A draft token is accepted iff it *is* the token the target chose after its parent; of equal siblings, the first.

    The target's choice (``sampling.choose``) is a function of the prefix and the seed, so what is emitted is what plain
    decoding emits, whatever the draft. The last token emitted, the choice at the last accepted node, is the bonus: -1
    if there the target could choose none. Does not wait for the device.

    Args:
        draft: [B, N].
        chosen: int64 [B, N], the target's token after each node.

    Returns:
        An acceptance with P = N.
    """
    count = draft.tokens.shape[1]
    nodes = torch.arange(count, device=chosen.device)
    if draft.parents is None:
        counts = 1 + (draft.tokens[:, 1:] == chosen[:, :-1]).cumprod(1).sum(1)
        path = nodes.where(nodes < counts[:, None], 0)
        return Acceptance(counts, path, chosen)
    above = draft.parents.clamp(min=0)
    agrees = (draft.tokens == chosen.gather(1, above)) & (draft.parents >= 0)
    first = torch.full_like(above, count).scatter_reduce_(1, above, nodes.where(agrees, count), "amin")
    accepted = first.gather(1, above) == nodes
    accepted[:, 0] = True
    # So far a node was asked about its parent only. After r rounds it has asked 2**r - 1 further nodes above.
    for _ in range((count - 1).bit_length()):
        accepted = accepted & accepted.gather(1, above)
        above = above.gather(1, above)
    # A node has at most one accepted child: the accepted nodes in their order are the path.
    counts = accepted.sum(1)
    path = nodes.where(accepted, count).sort(1).values
    path = path.where(path < count, 0)
    return Acceptance(counts, path, chosen.gather(1, path))


def rejection_accept(draft: Draft, target: Tensor, drafted: Tensor | None, generator: torch.Generator) -> Acceptance:
    """The classic p/q rule, as a REFERENCE for tests and comparison: the engine never uses it.

    Accept a child x with probability min(1, p(x) / q(x)); after a rejection p becomes max(p - q, 0), renormalised, and
    the next sibling is tried (Leviathan et al. 2023; several siblings: SpecInfer, Miao et al. 2024). Emits p exactly if

    * q is the *processed* distribution the child was really drawn from, and no drawn child was pruned for being drawn;
    * draft, acceptance and residual noise are disjoint: ``generator`` serves the last two one after the other, and must
      not replay the draws that made the draft.

    Args:
        draft: of one sequence, [1, N]; siblings are tried in node order.
        target: float [N, V], p after each node.
        drafted: float [N, V], row i the q that node i's *own* token was drawn from (row 0 is not used): for siblings
            drawn without replacement, q given the earlier ones. None: the children are deterministic (a top-k), q is a
            point mass on each; then a child is accepted with probability p(x), or struck from p.
        generator: on the probabilities' device.
    """
    tokens = draft.tokens[0].tolist()
    parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents[0].tolist()
    path = [0]
    p = target[0] / target[0].sum()
    for node in range(1, len(tokens)):
        if parents[node] != path[-1]:
            continue
        x = tokens[node]
        q = torch.zeros_like(p).index_fill_(0, draft.tokens[0, node], 1) if drafted is None else drafted[node]
        if bool(torch.rand((), generator=generator, device=p.device) * q[x] < p[x]):
            path.append(node)
            p = target[node] / target[node].sum()
        else:
            p = (p - q).clamp(min=0)
            p = p / p.sum()
    bonus = int(torch.multinomial(p, 1, generator=generator))
    emitted = [*(tokens[node] for node in path[1:]), bonus]
    return Acceptance(*(torch.tensor([of_one]) for of_one in (len(path), path, emitted)))
