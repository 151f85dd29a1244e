"""What the target makes of a draft: THE accept rule, and the classic p/q rule as a reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas.core import Acceptance, Draft


def accept(draft: Draft, chosen: Tensor | Sequence[int]) -> Acceptance:
    """A draft token is accepted iff it *is* the token the target chose after its parent.

    The target's choice (``sampling.choose``) is a function of the prefix and the seed, so what is emitted is what plain
    decoding emits, whatever the draft. The last token emitted, the choice at the last accepted node, is the bonus.

    Args:
        draft: N nodes.
        chosen: int64 [N], the target's token after each node.
    """
    if isinstance(chosen, Tensor):
        tokens, after = torch.stack((draft.tokens, chosen.to(draft.tokens.device))).tolist()  # one wait for the device
    else:
        tokens, after = draft.tokens.tolist(), list(chosen)
    path, emitted = [0], [after[0]]
    # One pass is a walk from the root: children come after their parents, and once a child is accepted its siblings (a
    # duplicate included) no longer have the current node as parent.
    for node in range(1, len(tokens)):
        if draft.parents[node] == path[-1] and tokens[node] == emitted[-1]:
            path.append(node)
            emitted.append(after[node])
    return Acceptance(tuple(path), tuple(emitted))


def rejection_accept(draft: Draft, target: Tensor, drafted: Tensor | None, generator: torch.Generator) -> Acceptance:
    """The classic p/q rule, as a REFERENCE for tests and comparison: the engine never uses it.

    Accept a child x with probability min(1, p(x) / q(x)); after a rejection p becomes max(p - q, 0), renormalised, and
    the next sibling is tried (Leviathan et al. 2023; several siblings: SpecInfer, Miao et al. 2024). Emits p exactly if

    * q is the *processed* distribution the child was really drawn from, and no drawn child was pruned for being drawn;
    * draft, acceptance and residual noise are disjoint: ``generator`` serves the last two one after the other, and must
      not replay the draws that made the draft.

    Args:
        draft: N nodes; siblings are tried in node order.
        target: float [N, V], p after each node.
        drafted: float [N, V], row i the q that node i's *own* token was drawn from (row 0 is not used): for siblings
            drawn without replacement, q given the earlier ones. None: the children are deterministic (a top-k), q is a
            point mass on each; then a child is accepted with probability p(x), or struck from p.
        generator: on the probabilities' device.
    """
    tokens = draft.tokens.tolist()
    path = [0]
    p = target[0] / target[0].sum()
    for node in range(1, len(tokens)):
        if draft.parents[node] != path[-1]:
            continue
        x = tokens[node]
        q = torch.zeros_like(p).index_fill_(0, draft.tokens[node], 1) if drafted is None else drafted[node]
        if bool(torch.rand((), generator=generator, device=p.device) * q[x] < p[x]):
            path.append(node)
            p = target[node] / target[node].sum()
        else:
            p = (p - q).clamp(min=0)
            p = p / p.sum()
    bonus = int(torch.multinomial(p, 1, generator=generator))
    return Acceptance(tuple(path), (*(tokens[node] for node in path[1:]), bonus))
