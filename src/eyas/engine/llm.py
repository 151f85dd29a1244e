"""A target and its drafter, loaded and ready: stream from it, or let it finish."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from eyas.core import DraftShape, EyasError, Request, RequestError, SamplingParams, UsageError
from eyas.drafter.contract import Drafter
from eyas.engine.engine import Engine
from eyas.engine.memory import Memory, kv_rows
from eyas.engine.policy import Auto, Fixed, Off, Policy, ladder
from eyas.engine.sequence import Emitted, FinishReason, Output
from eyas.engine.stats import AcceptanceStats
from eyas.progress import if_slow
from eyas.target.adapter import HFTarget
from eyas.target.images import encode_chat
from eyas.target.packing import pack_linears
from eyas.target.tuning import tune

Speculation = Literal["auto", "fixed", "off"]
MAX_RUNNING = 32
DEFAULT_CONTEXT = 8192  # KV is allocated up front; a longer context is for the asking

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or chat messages


@dataclass(frozen=True)
class Completion:
    """A finished answer and how it came about."""

    text: str
    tokens: tuple[Emitted, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: AcceptanceStats
    prefill_seconds: float  # until the first token
    decode_seconds: float  # from the first token to the last

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: the tokens after the first over the time they took; 0 where there is only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def acceptance_length(self) -> float:
        return self.stats.acceptance_length


class LLM:
    """Text in, text out. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        processor: Any = None,
        why_no_processor: str | None = None,
        drafter: Drafter | None = None,
        shape: DraftShape | None = None,
        context_length: int | None = None,
        speculation: Speculation = "auto",
        max_running_requests: int = MAX_RUNNING,
        chunked_prefill_size: int | None = None,
        memory: Memory | None = None,
        prefix_caching: bool = True,
        name: str = "",
    ):
        self.target = model if isinstance(model, HFTarget) else HFTarget(model)
        self.tokenizer, self.processor, self.drafter = tokenizer, processor, drafter
        self._why_no_processor = why_no_processor
        self.name = name or type(self.target.model).__name__
        self.context_length = fit_context(context_length, self.target.context_length)
        self.engine = Engine(
            self.target,
            drafter,
            shape=shape,
            context_length=self.context_length,
            tokenizer=tokenizer,
            eos_ids=eos_ids(self.target.model, tokenizer),
            max_running_requests=max_running_requests,
            kv_rows=kv_rows(self.target, drafter, self.context_length, shape, max_running_requests, memory),
            chunked_prefill_size=chunked_prefill_size,
            policy=policy_for(speculation, shape) if drafter else None,
            prefix_caching=prefix_caching,
        )
        self._ids = itertools.count()
        self._inboxes: dict[str, deque[Output]] = {}  # of the answers being read

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        images: Mapping[str, Any] | None = None,
        speculate: bool = True,
        **settings: Any,
    ) -> Iterator[Output]:
        """Yields the answer as it is decoded; the last output carries the finish reason and the statistics.

        ``settings`` are fields of SamplingParams, for short. ``images`` are a processor's tensors for a prompt given as
        token ids. Raises RequestError for a request that cannot be served, NonFiniteLogitsError when the target breaks.
        """
        return self._run(self.request(prompt, sampling, images, speculate, **settings))

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        images: Mapping[str, Any] | None = None,
        speculate: bool = True,
        **settings: Any,
    ) -> Completion:
        """The whole answer at once. Arguments and errors as for ``stream``."""
        return self.complete(self.request(prompt, sampling, images, speculate, **settings))

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        images: Mapping[str, Any] | None = None,
        speculate: bool = True,
        **settings: Any,
    ) -> Request:
        """What ``stream`` and ``generate`` make of their arguments."""
        unknown = set(settings) - set(SamplingParams.__dataclass_fields__)
        if unknown:
            known = ", ".join(SamplingParams.__dataclass_fields__)
            raise UsageError(f"Unknown sampling settings: {', '.join(sorted(unknown))}. Known ones: {known}.")
        ids, found = self.encode(prompt)
        if found and images:
            raise RequestError("Give images either in the messages or as tensors beside token ids, not both.")
        sampling = replace(sampling or SamplingParams(), **settings)
        return Request(str(next(self._ids)), ids, sampling, images=images or found, speculate=speculate)

    def complete(self, request: Request, listen: Callable[[Output], None] | None = None) -> Completion:
        """Decodes to the end; ``listen`` hears every output as it comes."""
        begin = first = time.perf_counter()
        outputs: list[Output] = []
        for output in self._run(request):
            if not outputs:
                first = time.perf_counter()
            outputs.append(output)
            if listen is not None:
                listen(output)
        end = time.perf_counter()
        last = outputs[-1]
        assert last.finish_reason is not None and last.stats is not None
        return Completion(
            text="".join(output.text for output in outputs),
            tokens=tuple(token for output in outputs for token in output.emitted),
            finish_reason=last.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            stats=last.stats,
            prefill_seconds=first - begin,
            decode_seconds=end - first,
        )

    def stream_all(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Answers all requests together and yields what comes of each as it comes, in no order but each one's own.

        An output with an ``error`` ends its request and no other. Ids must differ.
        """
        requests = list(requests)
        added: list[str] = []
        try:
            for request in requests:
                self.engine.add(request)
                added.append(request.id)
                self._inboxes[request.id] = deque()
            unfinished = set(added)
            while unfinished:
                if self.engine.idle:
                    raise EyasError("Requests were dropped: the engine was reset after a fault or an interruption.")
                self._step()
                for id in added:
                    while inbox := self._inboxes[id]:
                        output = inbox.popleft()
                        unfinished -= {id} if output.finish_reason else set()
                        yield output
        finally:
            for id in added:
                self.engine.abort(id)
                del self._inboxes[id]

    def _run(self, request: Request) -> Iterator[Output]:
        self.engine.add(request)  # outside: what it refuses must not end another request of this id
        inbox = self._inboxes[request.id] = deque()
        try:
            while inbox or not self.engine.idle:
                if not inbox:
                    self._step()
                    continue
                output = inbox.popleft()
                if output.error is not None:
                    raise output.error
                yield output
                if output.finish_reason is not None:
                    return
            raise EyasError("The request was dropped: the engine was reset after a fault or an interruption.")
        finally:  # the caller may stop listening at any time
            self.engine.abort(request.id)
            del self._inboxes[request.id]

    def _step(self) -> None:
        """One step of the engine: an answer that somebody has begun to read and put aside may come first."""
        for output in self.engine.step():
            self._inboxes[output.request_id].append(output)

    def encode(
        self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> tuple[list[int], dict[str, Any] | None]:
        """Token ids of text (as it is), token ids, or chat messages (through the chat template), and image tensors.

        ``chat_template_kwargs`` is what the template is told beside the messages.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("A prompt of text needs a tokenizer, and none was loaded: give token ids.")
            return list(self.tokenizer(prompt)["input_ids"]), None
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            speakers = self.tokenizer, self.processor, self._why_no_processor
            return encode_chat(items, *speakers, chat_template_kwargs)  # type: ignore[arg-type]
        if not all(isinstance(item, int) for item in items):
            raise RequestError("A prompt is text, a list of token ids, or a list of chat messages.")
        return [int(item) for item in items], None  # type: ignore[call-overload]


def load(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    shape: DraftShape | None = None,
    context_length: int | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    drafter_layer_ids: Sequence[int] | None = None,
    **serving: Any,
) -> LLM:
    """Loads a target, and a drafter for it, from a folder, a hub id, a GGUF file or the name ``smollm2``.

    ``drafter`` is a checkpoint in any of the three dialects, or ``untrained``: a random one of the usual shape, which
    shows that decoding is lossless and never that it is fast. Without one, decoding is plain. ``drafter_layer_ids``
    are entry ids to listen to instead of the checkpoint's, where these follow the other convention. ``serving`` are
    LLM's settings for many requests at once: speculation, max_running_requests, chunked_prefill_size, memory,
    prefix_caching.
    Raises TargetError or CheckpointError, each saying what was found and what to do.
    """
    from eyas.drafter.inspect import check_drafter
    from eyas.target.loading import load_target

    if drafter is not None and str(drafter) != "untrained":
        check_drafter(drafter)  # takes no time, loading a target does
    loaded = load_target(
        str(target),
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
    )
    with if_slow(f"loading {target}"):
        tune(loaded.model)
        adapter = HFTarget(loaded.model)
        return LLM(
            adapter,
            loaded.tokenizer,
            processor=loaded.processor,
            why_no_processor=loaded.why_no_processor,
            drafter=load_drafter_for(adapter, drafter, drafter_layer_ids) if drafter is not None else None,
            shape=shape,
            context_length=context_length,
            name=loaded.name,
            **serving,
        )


def load_drafter_for(target: HFTarget, drafter: str | Path, layer_ids: Sequence[int] | None = None) -> Drafter:
    """The drafter at a path, checked against ``target``; or, by the name ``untrained``, a random one for it."""
    from eyas.drafter.eagle3 import Eagle3Drafter
    from eyas.drafter.model import untrained
    from eyas.drafter.storage import load_for

    if str(drafter) == "untrained":
        sizes = target.hidden_size, target.num_layers, target.vocab_size
        model = untrained(*sizes, dtype=target.dtype, device=target.device)
    else:
        model = load_for(target, drafter, aux_layer_ids=tuple(layer_ids) if layer_ids else None)
    pack_linears(model)
    return Eagle3Drafter(model)


def policy_for(speculation: Speculation, shape: DraftShape | None) -> Policy:
    """``fixed`` drafts as told, ``auto`` as much as pays, ``off`` never."""
    if speculation == "off":
        return Off()
    return Fixed(shape or DraftShape()) if speculation == "fixed" else Auto(ladder(shape or DraftShape()))


def fit_context(wanted: int | None, most: int | None) -> int:
    if wanted is None:
        return min(most or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if wanted < 2 or (most is not None and wanted > most):
        raise UsageError(f"context_length must be from 2 to the target's {most or 'own limit'}, got {wanted}.")
    return wanted


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends an answer: the generation config's, and the tokenizer's own (as vLLM does)."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = found if isinstance(found, list | tuple) else [found]
    return tuple(sorted({int(i) for i in [*ids, getattr(tokenizer, "eos_token_id", None)] if i is not None}))
