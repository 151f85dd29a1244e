"""How often is a sampled draft token accepted? Seed-coupled choice against the p/q rule and deterministic top-k.

Run ``python benchmarks/coupling.py``. Targets are Zipf-like distributions with random ranks, drafters the same logits
plus normal noise, both at the same temperature. Printed is the probability that one of k sibling drafts is accepted:

* coupled: the drafter's k best of log q + noise, accepted if the target's argmax of log p + the same noise is one;
* p/q rule: k children drawn from q without replacement, accepted one after the other by min(1, p / q);
* top-k: the k likeliest children of q, accepted with p (its mass on them).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.core import Draft, SamplingParams
from eyas.speculation.sampling import perturbed
from eyas.speculation.verify import rejection_accept


@dataclass(frozen=True)
class Rates:
    """Acceptance rates of one case, and the overlap sum(min(p, q)), which bounds any rule with one child."""

    coupled: float
    rejection: float
    top_k: float
    overlap: float


def make_pair(vocab: int, error: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits [V] of a target and of a drafter whose logits are off by ``error`` (standard deviation)."""
    ranks = torch.randperm(vocab, generator=generator) + 1
    target = -1.5 * ranks.float().log() + 0.5 * torch.randn(vocab, generator=generator)
    return target, target + error * torch.randn(vocab, generator=generator)


def measure(
    temperature: float, error: float, k: int, *, contexts: int = 8, samples: int = 100, vocab: int = 512
) -> Rates:
    """Average rates over ``contexts`` random pairs with ``samples`` draws each."""
    totals = torch.zeros(4, dtype=torch.float64)
    for context in range(contexts):
        generator = torch.Generator().manual_seed(context)  # the same pairs on every line of the table
        target, drafter = make_pair(vocab, error, generator)
        params = SamplingParams(temperature=temperature, seed=context)
        p, q = ((logits.double() / temperature).softmax(-1) for logits in (target, drafter))
        coupled = _coupled(target, drafter, params, k, samples)
        rejection = sum(_rejection(p, q, k, generator) for _ in range(samples)) / samples
        totals += torch.tensor(
            [coupled, rejection, p[q.topk(k).indices].sum(), torch.minimum(p, q).sum()], dtype=torch.float64
        )
    return Rates(*(totals / contexts).tolist())


def _coupled(target: Tensor, drafter: Tensor, params: SamplingParams, k: int, samples: int) -> float:
    """Each sample has an output index of its own, and so its own noise."""
    indices = torch.arange(samples)
    chosen, children = (perturbed(x.expand(samples, -1), params, indices) for x in (target, drafter))
    return float((children.topk(k).indices == chosen.argmax(-1)[:, None]).any(-1).double().mean())


def _rejection(p: Tensor, q: Tensor, k: int, generator: torch.Generator) -> bool:
    children = torch.multinomial(q, k, generator=generator)  # in the order drawn
    drafted = q.repeat(k + 1, 1)
    for i in range(1, k):
        drafted[i + 1 :, children[i - 1]] = 0
    drafted /= drafted.sum(-1, keepdim=True)
    tokens = torch.cat((torch.tensor([0]), children))
    draft = Draft(tokens[None], torch.tensor([[-1, *[0] * k]]), torch.tensor([[0, *[1] * k]]))
    return int(rejection_accept(draft, p.expand(k + 1, -1), drafted, generator).counts) > 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400, help="draws per context")
    parser.add_argument("--contexts", type=int, default=16, help="random target and drafter pairs per line")
    args = parser.parse_args()
    print(f"{'temperature':>11} {'error':>6} {'k':>3} | {'coupled':>8} {'p/q rule':>9} {'top-k':>7} | {'overlap':>8}")
    for temperature in (0.6, 1.0):
        for error in (0.25, 0.5, 1.0):
            for k in (1, 2, 4):
                rates = measure(temperature, error, k, contexts=args.contexts, samples=args.samples)
                print(
                    f"{temperature:11.1f} {error:6.2f} {k:3d} | {rates.coupled:8.3f} {rates.rejection:9.3f} "
                    f"{rates.top_k:7.3f} | {rates.overlap:8.3f}"
                )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
