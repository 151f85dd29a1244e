"""Requests in, tokens out. ``step`` is the whole engine on one screen."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import torch

from eyas.core import Acceptance, Draft, DraftShape, EyasError, Request, RequestError, SamplingParams, UsageError
from eyas.drafter.contract import Drafter
from eyas.engine.runner import Runner
from eyas.engine.scheduler import Scheduler
from eyas.engine.sequence import Emitted, Output, Sequence
from eyas.engine.text import TextStream
from eyas.speculation.sampling import TokenHistory, choose, logprobs, needs_history
from eyas.speculation.tree import chain, path_tokens
from eyas.speculation.verify import accept
from eyas.target.contract import Eagle3Target


class Engine:
    """Decodes requests with one target and, where a drafter is given, speculatively: the tokens are the same."""

    def __init__(
        self,
        target: Eagle3Target,
        drafter: Drafter | None = None,
        *,
        shape: DraftShape | None = None,
        context_length: int,
        tokenizer: Any = None,
        eos_ids: Many[int] = (),
        slots: int = 1,
    ):
        if target.context_length is not None and context_length > target.context_length:
            raise UsageError(f"This target's context ends at {target.context_length} tokens, got {context_length}.")
        self.target, self.drafter = target, drafter
        self.shape = shape or DraftShape()
        self.context_length = context_length
        self.tokenizer, self.eos_ids = tokenizer, tuple(eos_ids)
        self.scheduler = Scheduler(slots)
        # Behind the context there is room for a draft: its nodes, or all that the drafter tries for them.
        spare = max(self.shape.num_draft_tokens, self.shape.eagle_topk * (self.shape.num_steps - 1))
        self.runner = Runner(target, drafter, slots, rows=context_length + spare)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError when it can never be served."""
        count, room = len(request.prompt_ids) + len(request.output_ids), self.context_length
        if not request.prompt_ids:
            raise RequestError("The prompt is empty: give at least one token.")
        if count >= room:
            raise RequestError(f"The prompt has {count} tokens, the context holds {room} with the answer: shorten it.")
        if len(request.output_ids) >= request.sampling.max_tokens:
            raise RequestError(
                f"All {request.sampling.max_tokens} tokens (max_tokens) of the answer are there already."
            )
        if not all(0 <= token < self.target.vocab_size for token in (*request.prompt_ids, *request.output_ids)):
            raise RequestError(f"The prompt has token ids outside the target's 0 to {self.target.vocab_size - 1}.")
        if self.scheduler.knows(request.id):
            raise RequestError(f"A request with the id {request.id!r} is still being answered: ids must differ.")
        if request.sampling.stop and self.tokenizer is None:
            raise RequestError("Stop strings need a tokenizer, and this engine has none: use stop_token_ids.")
        self.scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Reads one waiting prompt, or moves every running sequence on by one draft."""
        batch = self.scheduler.schedule()
        if batch.prefill:
            return [self._prefill(request) for request in batch.prefill]
        if not batch.decode:
            assert self.idle, "requests wait, but no slot is free and nothing runs"
            return []
        drafts = self._propose(batch.decode)
        output = self.runner.verify(batch.decode, drafts)
        results = []
        for row, (sequence, draft) in enumerate(zip(batch.decode, drafts, strict=True)):
            nodes = slice(len(draft.parents))
            states = None if output.states is None else output.states[row, nodes]
            results.append(self._accept(sequence, draft, output.logits[row, nodes], states))
        return results

    def abort(self, request_id: str) -> None:
        """Drops a request, waiting or running; unknown ids are none of our business any more."""
        self.scheduler.drop_waiting(request_id)
        for sequence in [s for s in self.scheduler.running if s.request.id == request_id]:
            self.scheduler.finish(sequence)

    def stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return (*(() if sampling.ignore_eos else self.eos_ids), *sampling.stop_token_ids)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def _prefill(self, request: Request) -> Output:
        sequence = self._sequence(request)
        self.scheduler.start(sequence)
        root = chain([[*request.prompt_ids, *request.output_ids][-1]], device=self.target.device)
        try:
            pending = self.runner.prefill(sequence)
            logits = pending.output.logits[0]
            tokens = self._choose(sequence, root, logits)
        except EyasError as error:
            return self._fail(sequence, error)
        result = self._emit(sequence, Acceptance((0,), tuple(tokens.tolist())), logits)
        if sequence.finish_reason is None:
            self.runner.after_prefill(sequence, pending)
        return result

    def _propose(self, sequences: list[Sequence]) -> list[Draft]:
        """Drafts as deep as each sequence can still use; a root alone is plain decoding."""
        drafts = {s.slot: chain([s.last_token], device=self.target.device) for s in sequences}
        groups: dict[DraftShape, list[Sequence]] = {}
        for sequence in sequences:
            if self.runner.drafts_for(sequence) and (shape := limited(self.shape, sequence.room - 1)):
                groups.setdefault(shape, []).append(sequence)
        for shape, group in groups.items():
            assert self.drafter is not None
            drafts |= zip([s.slot for s in group], self.drafter.propose(group, shape), strict=True)
        return list(drafts.values())

    def _accept(self, sequence: Sequence, draft: Draft, logits: torch.Tensor, states: torch.Tensor | None) -> Output:
        try:
            acceptance = accept(draft, self._choose(sequence, draft, logits))
        except EyasError as error:
            return self._fail(sequence, error) if len(draft.parents) == 1 else self._again(sequence, draft)
        result = self._emit(sequence, acceptance, logits)
        sequence.stats.record(draft, acceptance, len(result.emitted))
        self.runner.keep(sequence, acceptance, states)
        return result

    def _again(self, sequence: Sequence, broken: Draft) -> Output:
        """This step without a draft: what broke it may be a token that plain decoding does not meet, or not yet."""
        self.runner.drop_draft(sequence)
        root = chain([sequence.last_token], device=self.target.device)
        output = self.runner.verify([sequence], [root])
        result = self._accept(sequence, root, output.logits[0], None if output.states is None else output.states[0])
        sequence.stats.record(broken, Acceptance((0,), ()), len(result.emitted))  # verified, and nothing was accepted
        return result

    def _choose(self, sequence: Sequence, draft: Draft, logits: torch.Tensor) -> torch.Tensor:
        """The target's token [N] after each node of the draft."""
        history = sequence.history.extended(path_tokens(draft)) if sequence.history else None
        indices = [sequence.output_index + depth for depth in draft.depths]
        return choose(logits, sequence.sampling, indices, history=history, stop_ids=sequence.stop_ids)

    def _emit(self, sequence: Sequence, acceptance: Acceptance, logits: torch.Tensor) -> Output:
        """Appends tokens until the answer ends; what was accepted behind its end is dropped."""
        reports = []
        if (wanted := sequence.sampling.logprobs) is not None:
            reports = logprobs(logits[list(acceptance.path)], torch.tensor(acceptance.tokens), wanted)
        emitted = []
        for i, token in enumerate(acceptance.tokens):
            text = sequence.append(token)
            own, top = reports[i] if reports else (None, [])
            emitted.append(Emitted(token, text, i < len(acceptance.tokens) - 1, own, tuple(top)))
            if sequence.finish_reason is not None:
                break
        return self._output(sequence, tuple(emitted))

    def _fail(self, sequence: Sequence, error: EyasError) -> Output:
        sequence.finish_reason = "error"
        self.runner.clear(sequence.slot)
        return replace(self._output(sequence, ()), error=error)

    def _output(self, sequence: Sequence, emitted: tuple[Emitted, ...]) -> Output:
        if sequence.finish_reason is None:
            return Output(sequence.request.id, emitted)
        self.scheduler.finish(sequence)
        tail = sequence.text.flush() if sequence.text else ""
        return Output(sequence.request.id, emitted, sequence.finish_reason, tail, stats=sequence.stats)

    def _sequence(self, request: Request) -> Sequence:
        sampling, vocab = request.sampling, self.target.vocab_size
        history = None
        if needs_history(sampling):
            history = TokenHistory.from_tokens(request.prompt_ids, request.output_ids, vocab, self.target.device)
        text = TextStream(self.tokenizer, sampling.stop) if self.tokenizer is not None else None
        if text is not None:
            for count, token in enumerate(request.output_ids, start=1):
                text.push(token, may_stop=count >= sampling.min_tokens)
        stop_ids = self.stop_ids(sampling)
        return Sequence(
            request,
            slot=self.scheduler.take_slot(),  # last: whatever fails before leaves the slot free
            limit=self.context_length,
            stop_ids=stop_ids,
            text=text,
            history=history,
            output_ids=list(request.output_ids),
        )


def limited(shape: DraftShape, steps: int) -> DraftShape | None:
    """``shape`` with at most ``steps`` steps; None where that is none."""
    if steps >= shape.num_steps:
        return shape
    if steps < 1:
        return None
    most = DraftShape.most_tokens(steps, shape.eagle_topk)
    return DraftShape(steps, shape.eagle_topk, min(shape.num_draft_tokens, most))
