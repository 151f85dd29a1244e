"""The vocabulary every room shares: what a request is, what a draft is, what was accepted, what can go wrong."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported by the rooms that compute, never by `import eyas`
    import torch


class EyasError(Exception):
    """Something failed, and the message says what, where, and what to do. The CLI exits with 1."""

    exit_code = 1


def one_line(error: BaseException) -> str:
    """What another library's error says, for a sentence of ours; its kind where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:500]} ..."


class UsageError(EyasError):
    """The caller asked for something that cannot be: the CLI exits with 2."""

    exit_code = 2


class TargetError(EyasError):
    """The target model cannot be loaded, or cannot do what EAGLE-3 needs of it."""


class CheckpointError(EyasError):
    """A drafter checkpoint is not what it says it is."""


class RequestError(UsageError):
    """One request cannot be served; others can."""


class NonFiniteLogitsError(EyasError):
    """The target produced NaN or infinite logits, so no token can be chosen."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the whole answer has to be: exactly one of these. Names and meanings are vLLM's.

    ``json`` is a JSON schema, given as text or as what it says and kept as text; ``json_object`` any JSON object;
    ``choice`` one of these strings; ``grammar`` a context-free grammar in Lark's notation or llama.cpp's GBNF (EBNF).
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json, str | None):
            try:
                object.__setattr__(self, "json", json.dumps(self.json, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"structured_outputs: this schema cannot be written as JSON ({error}).") from error
        if self.choice is not None:
            object.__setattr__(self, "choice", (self.choice,) if isinstance(self.choice, str) else tuple(self.choice))
        given = [name for name in self.__dataclass_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"{' and '.join(given)} were" if given else "none was"
            raise UsageError(
                f"structured_outputs takes exactly one of {', '.join(self.__dataclass_fields__)}: {found} given."
            )
        texts = self.choice if self.choice is not None else (self.regex or "", self.grammar or "")
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"structured_outputs.{given[0]} must be text, or for choice at least one of them.")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in self.__dataclass_fields__ if getattr(self, name) not in (None, False))


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Names and meanings are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 (or -1), ``top_p`` 1 and ``min_p`` 0 are off; ``seed`` None draws one.
    ``repetition_penalty`` counts prompt and output, presence and frequency penalties output only. The text depends on
    target, prompt and ``seed``. ``structured_outputs`` constrains it: then it also ends ("stop") where nothing may
    follow, before ``min_tokens`` too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = None  # type: ignore[assignment]  # never None once made
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # one string will do too
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: the emitted token's and the n most likely ones'
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        settled = {
            "seed": secrets.randbits(63) if self.seed is None else self.seed,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "logit_bias": dict(self.logit_bias or {}),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        whole = [getattr(self, name) for name in ("top_k", "seed", "max_tokens", "min_tokens")]
        if not all(isinstance(n, int) for n in (*whole, *self.stop_token_ids, *self.logit_bias, self.logprobs or 0)):
            raise UsageError("top_k, seed, max_tokens, min_tokens, logprobs and token ids must be whole numbers")
        checks = [
            (0 <= self.temperature < math.inf, f"temperature must be >= 0, got {self.temperature}"),
            (self.top_k >= 0, f"top_k must be >= 0 (0 or -1 is off), got {self.top_k}"),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}"),
            (0 < self.repetition_penalty < math.inf, f"repetition_penalty must be > 0, got {self.repetition_penalty}"),
            (abs(self.presence_penalty) <= 2, f"presence_penalty must be in [-2, 2], got {self.presence_penalty}"),
            (abs(self.frequency_penalty) <= 2, f"frequency_penalty must be in [-2, 2], got {self.frequency_penalty}"),
            (self.max_tokens >= 1, f"max_tokens must be >= 1, got {self.max_tokens}"),
            (0 <= self.min_tokens <= self.max_tokens, f"min_tokens must be in [0, max_tokens], got {self.min_tokens}"),
            (all(self.stop), "stop strings must not be empty"),
            (self.logprobs is None or 0 <= self.logprobs <= 20, f"logprobs must be in [0, 20], got {self.logprobs}"),
            (
                isinstance(self.structured_outputs, StructuredOutputsParams | None),
                f"structured_outputs must be StructuredOutputsParams, got {type(self.structured_outputs).__name__}",
            ),
        ]
        for fine, message in checks:
            if not fine:  # NaN fails every comparison above, so it is caught here too
                raise UsageError(message)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class DraftShape:
    """SGLang's three numbers. ``num_draft_tokens`` counts the root; ``eagle_topk`` 1 is a chain."""

    num_steps: int = 5
    eagle_topk: int = 1
    num_draft_tokens: int = 6

    def __post_init__(self) -> None:
        k, steps = self.eagle_topk, self.num_steps
        if steps < 1 or k < 1:
            raise UsageError(f"num_steps and eagle_topk must be >= 1, got {steps} and {k}")
        if max(steps, k) > 64 or self.num_draft_tokens > 1024:
            raise UsageError(f"A draft has at most 64 steps, top-k 64 and 1,024 tokens, got {self}")
        if k == 1 and self.num_draft_tokens != steps + 1:
            raise UsageError(
                f"eagle_topk 1 is a chain: num_draft_tokens must be num_steps + 1 = {steps + 1} (it counts the root), "
                f"got {self.num_draft_tokens}"
            )
        most = self.most_tokens(steps, k)
        if not 2 <= self.num_draft_tokens <= most:
            raise UsageError(
                f"num_draft_tokens must be in [2, {most}] for num_steps {steps} and eagle_topk {k} "
                f"(it counts the root), got {self.num_draft_tokens}"
            )

    @staticmethod
    def most_tokens(num_steps: int, eagle_topk: int) -> int:
        """Nodes of the whole tree: the root, its children, and so many more at every further step."""
        return 1 + eagle_topk + (num_steps - 1) * eagle_topk * eagle_topk


@dataclass(frozen=True)
class Request:
    """One prompt to continue. ``images`` is a multimodal processor's output: pixel tensors, grids, token types.

    ``output_ids`` are tokens of the answer that were emitted before (a restart, a forced prefix): decoding goes on
    behind them as if it had never stopped.
    """

    id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    images: Mapping[str, Any] | None = None
    speculate: bool = True  # False: plain decoding, with the same tokens
    output_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Draft:
    """Candidate continuations of B sequences, each a tree of N nodes. Node 0 is the root: the last emitted token.

    Parents come before their children. Node i > 0 without a parent (-1) is padding: it is never accepted.
    """

    tokens: torch.Tensor  # int64 [B, N], target token ids
    parents: torch.Tensor | None = None  # int64 [B, N], -1 for the root; None: chains, node i continues node i - 1
    depths: torch.Tensor | None = None  # int64 [B, N], 0 for root and padding; None with parents None

    @property
    def steps(self) -> int:
        """How deep it may be: of a tree without looking at it, which would wait for the device."""
        return self.tokens.shape[1] - 1


@dataclass(frozen=True)
class Acceptance:
    """What the target made of B drafts. ``tokens`` are emitted; the last one of each sequence is its bonus token."""

    counts: torch.Tensor  # int64 [B] >= 1, tokens emitted
    path: torch.Tensor  # int64 [B, P], node indices from the root to the last accepted node; P >= counts, then 0
    tokens: torch.Tensor  # int64 [B, P], the accepted draft tokens, then the bonus token; then whatever
