"""All that can be set about a training, once: a field here is a flag of ``eyas train`` and a line of its help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from eyas.core import EyasError, UsageError

DRAFTER, RECIPE, WATCHING, MACHINE = "The drafter", "Recipe", "Watching and keeping", "Machine"
DRAFT_VOCAB = 8192  # by default, or as many tokens as the data has


class TrainingError(EyasError):
    """A training cannot go on, or cannot be resumed."""


@dataclass(frozen=True)
class Flag:
    """What the command line says of a field; ``default`` stands for a None that is settled later."""

    help: str
    group: str
    default: str | None = None
    metavar: str | None = None


@dataclass(frozen=True)
class TrainConfig:
    """A field that is None is settled when target and machine are known (``settled``)."""

    target: str
    data: str
    out: str

    drafter: Annotated[
        str | None,
        Flag("Go on from this drafter; its shape and vocabulary stay.", DRAFTER, "a new one"),
    ] = None
    draft_vocab_size: Annotated[
        int | None,
        Flag(
            "Tokens it can propose: the most frequent in the answers. 0: all of the target's.",
            DRAFTER,
            f"{DRAFT_VOCAB}, or as many as the answers have",
        ),
    ] = None
    layers: Annotated[int, Flag("Decoder layers of a new drafter.", DRAFTER)] = 1
    aux_layers: Annotated[
        str | None,
        Flag("Entry ids of the target's states that a new drafter is fed.", DRAFTER, "2,n/2,n-3", "ID,ID,..."),
    ] = None

    unroll: Annotated[
        int | None,
        Flag("Steps that the drafter is unrolled on its own outputs (training-time test).", RECIPE, "4; on a GPU 7"),
    ] = None
    loss: Annotated[
        Literal["cross-entropy", "acceptance"],
        Flag("Against the target's distribution, or the chance to be accepted itself (LK loss).", RECIPE),
    ] = "cross-entropy"
    step_decay: Annotated[float, Flag("Weight of each unroll step over the one before.", RECIPE)] = 0.8
    label_temperature: Annotated[
        float, Flag("Temperature of the target's distribution that is learned; towards 0 greedy counts.", RECIPE)
    ] = 1.0
    epochs: Annotated[int, Flag("Times through the data.", RECIPE)] = 1
    max_steps: Annotated[int | None, Flag("End sooner, after so many updates.", RECIPE, "all epochs")] = None
    batch_tokens: Annotated[
        int | None, Flag("Tokens in a batch, prompts included, for each device.", RECIPE, "768; on a GPU 8192")
    ] = None
    accumulation: Annotated[int, Flag("Batches for each update.", RECIPE)] = 1
    max_length: Annotated[
        int | None, Flag("Leave out conversations that are longer, in tokens.", RECIPE, "the target's context")
    ] = None
    learning_rate: Annotated[
        float | None, Flag("The highest one.", RECIPE, "0.001 at hidden size 576 or less, the wider the smaller")
    ] = None
    schedule: Annotated[
        Literal["cosine", "linear", "constant"], Flag("How the learning rate falls after warming up.", RECIPE)
    ] = "cosine"
    warmup: Annotated[float, Flag("Share of the updates in which it rises.", RECIPE)] = 0.03
    weight_decay: Annotated[float, Flag("AdamW's.", RECIPE)] = 0.0
    clip: Annotated[float, Flag("Largest norm of the gradient.", RECIPE)] = 1.0
    seed: Annotated[int, Flag("Of the order of the data, and of a new drafter's weights.", RECIPE)] = 0

    eval_every: Annotated[int, Flag("Updates between measurements of real acceptance; 0: never.", WATCHING)] = 500
    eval_prompts: Annotated[
        int, Flag("Conversations held out of the data, whose prompts are answered for that.", WATCHING)
    ] = 16
    eval_builtin: Annotated[
        int, Flag("Built-in prompts that are answered too: chat, code and maths by turns.", WATCHING)
    ] = 12
    eval_tokens: Annotated[int, Flag("Tokens of each answer.", WATCHING)] = 64
    eval_steps: Annotated[int, Flag("Length of the drafted chains.", WATCHING)] = 5
    save_every: Annotated[int, Flag("Updates between checkpoints.", WATCHING)] = 200
    resume: Annotated[bool, Flag("Go on where the training in OUT stopped.", WATCHING)] = False
    stop_after: Annotated[
        float | None, Flag("Stop after so many minutes, to be resumed another time.", WATCHING, "never")
    ] = None
    track: Annotated[
        str | None,
        Flag("Trackers of accelerate, such as tensorboard or wandb.", WATCHING, "none", "NAME,NAME,..."),
    ] = None
    license: Annotated[str | None, Flag("Licence of the drafter, for its card.", WATCHING, "none named")] = None

    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Flag("What is multiplied in; weights and optimiser stay float32.", MACHINE),
    ] = "auto"
    dtype: Annotated[str, Flag("The target's: auto, float32, bfloat16 or float16.", MACHINE)] = "auto"
    device: Annotated[
        str | None,
        Flag(
            "cpu, cuda, cuda:1, ...; for several: accelerate launch -m eyas train ...",
            MACHINE,
            "a GPU if there is one",
        ),
    ] = None
    trust_remote_code: Annotated[bool, Flag("Run Python code that comes with the target.", MACHINE)] = False

    def __post_init__(self) -> None:
        at_least_one = ["layers", "unroll", "epochs", "max_steps", "batch_tokens", "accumulation", "max_length"]
        at_least_one += ["eval_tokens", "eval_steps", "save_every"]
        positive = ("learning_rate", "label_temperature", "step_decay", "clip", "stop_after")
        checks = [(getattr(self, n) is None or getattr(self, n) >= 1, f"{n} must be at least 1") for n in at_least_one]
        checks += [(_between(getattr(self, n), 1e-12, math.inf), f"{n} must be above 0") for n in positive]
        checks += [
            (getattr(self, n) is None or getattr(self, n) >= 0, f"{n} must not be negative")
            for n in ("draft_vocab_size", "eval_every", "eval_prompts", "eval_builtin", "seed", "weight_decay")
        ]
        checks += [
            (_between(self.warmup, 0, 1), "warmup is a share of the updates, from 0 to 1"),
            (self.loss in ("cross-entropy", "acceptance"), "loss is cross-entropy or acceptance"),
            (self.schedule in ("cosine", "linear", "constant"), "schedule is cosine, linear or constant"),
            (self.precision in ("auto", "float32", "bfloat16"), "precision is auto, float32 or bfloat16"),
            (
                not self.eval_every or self.eval_prompts + self.eval_builtin > 0,
                "eval_every needs prompts: set eval_prompts or eval_builtin, or eval_every to 0",
            ),
        ]
        for fine, message in checks:
            if not fine:
                name = message.split()[0]
                raise UsageError(f"{message}, got {getattr(self, name, None)!r}.")

    def settled(self, device: str, hidden_size: int) -> TrainConfig:
        """With a value for everything that depends on the machine (``cpu``, ``cuda``) or the drafter's width."""
        cpu = device == "cpu"
        defaults: dict[str, Any] = {
            "unroll": 4 if cpu else 7,
            "batch_tokens": 768 if cpu else 8192,
            "learning_rate": round(1e-3 * min(1.0, 576 / hidden_size), 6),
        }
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})

    @property
    def aux_layer_ids(self) -> tuple[int, ...] | None:
        if self.aux_layers is None:
            return None
        try:
            return tuple(sorted(int(part) for part in self.aux_layers.split(",")))
        except ValueError:
            raise UsageError(f"aux_layers takes numbers with commas between them, got {self.aux_layers!r}.") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Raises UsageError for keys that are no fields."""
        if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
            raise UsageError(f"A training has no setting {unknown[0]!r}; it was written by another version of Eyas.")
        return cls(**values)

    def check_same(self, before: TrainConfig) -> None:
        """Raises UsageError where resuming with these settings would not be the training that was begun."""
        for field in fields(self):
            new, old = getattr(self, field.name), getattr(before, field.name)
            if field.name not in MAY_CHANGE and new != old:
                raise UsageError(
                    f"This training was begun with {field.name} {old!r}, and now it is {new!r}: resume it as it was "
                    "begun, or start another from its drafter (--drafter, and another --out)."
                )


# What may differ when a training is resumed: where things are, and when it stops or says something.
MAY_CHANGE = ("target", "data", "out", "resume", "stop_after", "save_every", "track", "license", "trust_remote_code")


def _between(value: float | None, low: float, high: float) -> bool:
    return value is None or low <= value <= high  # NaN is not
