"""What a forward takes on a machine: memory or arithmetic, whichever is slower, and what comes on top of them.

Of each kind of weights, of the experts and of attention the larger of bytes / bandwidth and operations / peak counts
(Williams, Waterman, Patterson 2009). Activations are left out: at decoding they are small beside weights and KV.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

from eyas.bench.hardware import Hardware
from eyas.bench.shapes import Model
from eyas.core import DraftShape
from eyas.speculation.cost import FORWARD, PROPOSE, Costs

STATE_BYTES = 2  # of a number in an all-reduce


@dataclass(frozen=True)
class Split:
    """Seconds of one GPU, all GPUs working at once.

    ``weights``, ``experts`` and ``kv`` are the time to read them; ``compute`` is what arithmetic takes beyond that.
    """

    weights: float = 0.0
    experts: float = 0.0
    kv: float = 0.0
    compute: float = 0.0
    all_reduce: float = 0.0
    launch: float = 0.0

    @property
    def total(self) -> float:
        return sum(astuple(self))

    def __add__(self, other: Split) -> Split:
        return Split(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, count: int) -> Split:
        return Split(*(count * part for part in astuple(self)))

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]


def forward(
    model: Model,
    hardware: Hardware,
    gpus: int,
    *,
    sequences: int,
    tokens: int,
    context: int,
    logits: int | None = None,
    fuse: bool = False,
) -> Split:
    """One forward of ``tokens`` tokens of each sequence over ``context`` tokens of cache, under tensor parallelism.

    ``logits``: tokens that go through the head (None: all). ``fuse``: a drafter that starts from the target's states.
    """
    rows = sequences * tokens
    heads = rows if logits is None else logits
    parts = [(part, rows) for part in model.weights] + [(model.head, heads)]
    if fuse and model.fusion is not None:
        parts.append((model.fusion, rows))
    split = Split(launch=model.kernels * hardware.kernel_us * 1e-6)
    for part, count in parts:
        share = gpus if part.split else 1
        reading = part.bytes / share / hardware.bytes_per_second
        computing = 2 * part.total * count / share / hardware.flops_per_second(part.format.compute)
        split += Split(weights=reading, compute=max(0.0, computing - reading))
    split += _experts(model, hardware, gpus, rows) + _attention(model, hardware, gpus, sequences, tokens, context)
    return split + Split(all_reduce=_all_reduce(model, hardware, gpus, rows, heads))


def _experts(model: Model, hardware: Hardware, gpus: int, rows: int) -> Split:
    """Every GPU has its slice of each expert, so the slices of all that are touched are read."""
    experts = model.experts
    if experts is None:
        return Split()
    reading = experts.touched(rows) * experts.bytes_of_one * experts.layers / gpus / hardware.bytes_per_second
    operations = 2 * rows * experts.chosen * experts.count * experts.layers / gpus
    computing = operations / hardware.flops_per_second(experts.format.compute)
    return Split(experts=reading, compute=max(0.0, computing - reading))


def _attention(model: Model, hardware: Hardware, gpus: int, sequences: int, tokens: int, context: int) -> Split:
    """The cache is read once for all of a sequence's tokens."""
    attention = model.attention
    looked_at = sequences * attention.rows(context)
    one = attention.elements * attention.element_bytes * attention.heads_on_one(gpus)
    reading = looked_at * one / hardware.bytes_per_second
    computing = looked_at * tokens * attention.flops / gpus / hardware.flops_per_second("bf16")
    return Split(kv=reading, compute=max(0.0, computing - reading))


def _all_reduce(model: Model, hardware: Hardware, gpus: int, rows: int, logits: int) -> float:
    """Two a layer (after attention, after the MLP), one after the split embedding, and the logits gathered."""
    states = (2 * model.layers + 1) * hardware.all_reduce_seconds(rows * model.hidden * STATE_BYTES, gpus)
    return states + hardware.gather_seconds(logits * model.vocabulary * STATE_BYTES, gpus)


@dataclass(frozen=True)
class Forecast(Costs):
    """The costs of decoding with a target and a drafter on a machine, for ``speculation.cost.best``."""

    target: Model
    drafter: Model
    hardware: Hardware
    gpus: int = 1

    def verify(self, B: int, T: int, S: int) -> Split:
        """The target's forward over T tokens of each of B sequences; T = 1 is a plain step."""
        once = Split(launch=self.hardware.step_us * 1e-6)
        return once + forward(self.target, self.hardware, self.gpus, sequences=B, tokens=T, context=S)

    def draft(self, shape: DraftShape, B: int, S: int) -> Split:
        """The drafter's whole share of a step.

        Its first pass redoes as many tokens as a step can accept, with the target's states, and gives the first level;
        each further pass extends ``eagle_topk`` branches by a token, and each branch reads the cache for itself.
        """
        first = self._pass(B, shape.num_steps + 1, S, logits=B, fuse=True)
        return first + self._pass(B * shape.eagle_topk, 1, S).times(shape.num_steps - 1)

    def _pass(self, sequences: int, tokens: int, S: int, **how: Any) -> Split:
        return forward(self.drafter, self.hardware, self.gpus, sequences=sequences, tokens=tokens, context=S, **how)

    def seconds(self, kind: str, B: int, T: int, S: int) -> float | None:
        """As ``CostModel.seconds``: ``propose`` is T passes of B rows, ``rest`` is part of the others."""
        if kind == FORWARD:
            return self.verify(B, T, S).total
        return self._pass(B, 1, S).times(T).total if kind == PROPOSE else None

    def step(self, shape: DraftShape | None, B: int, S: int) -> float | None:
        verify = self.verify(B, shape.num_draft_tokens if shape else 1, S)
        return (verify + self.draft(shape, B, S)).total if shape else verify.total
