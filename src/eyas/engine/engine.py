"""Requests in, tokens out. ``step`` is the whole engine on one screen."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch

from eyas.core import DraftShape, EyasError, Request, RequestError, SamplingParams, UsageError, one_line
from eyas.drafter.contract import Drafter, drafted_rows
from eyas.engine.grammar import Grammars
from eyas.engine.policy import BatchView, Decision, Fixed, Off, Policy, StepReport, describe
from eyas.engine.runner import Batch, Runner
from eyas.engine.scheduler import Chunk, Plan, Scheduler, slot_bucket, slot_length
from eyas.engine.sequence import Emitted, Output, Sequence
from eyas.engine.text import TextStream
from eyas.speculation.sampling import TokenHistory, check_bias, choose, logprobs, needs_history, no_choice
from eyas.speculation.verify import accept
from eyas.target.contract import Eagle3Target

logger = logging.getLogger(__name__)

CATCH_UP = 16  # tokens decoded plainly after which the drafter gives a sequence up
PREFILL_CHUNK = {"cpu": 256, "cuda": 2048}  # tokens of prompts a step: bounds how long others wait for theirs


class Engine:
    """Decodes requests with one target and, where a drafter is given, speculatively: the tokens are the same.

    ``kv_rows`` tokens of keys and values are allocated at once and shared by all requests.
    """

    def __init__(
        self,
        target: Eagle3Target,
        drafter: Drafter | None = None,
        *,
        shape: DraftShape | None = None,
        context_length: int,
        tokenizer: Any = None,
        eos_ids: Many[int] = (),
        max_running_requests: int = 1,
        kv_rows: int | None = None,
        chunked_prefill_size: int | None = None,
        policy: Policy | None = None,
        prefix_caching: bool = True,
    ):
        if target.context_length is not None and context_length > target.context_length:
            raise UsageError(f"This target's context ends at {target.context_length} tokens, got {context_length}.")
        if chunked_prefill_size is not None and chunked_prefill_size < 1:
            raise UsageError(f"chunked_prefill_size must be at least 1, got {chunked_prefill_size}.")
        self.target, self.drafter = target, drafter
        self.shape = shape or DraftShape()
        self.context_length = context_length
        self.tokenizer, self.eos_ids = tokenizer, tuple(eos_ids)
        self.grammars = Grammars(tokenizer, target.vocab_size, self.eos_ids)
        self.policy: Policy = policy or (Fixed(self.shape) if drafter else Off())
        shapes = (self.shape, *self.policy.shapes)
        # a whole draft accepted, and a plain step behind it
        catch_up = max(CATCH_UP, *(s.num_steps + 2 for s in shapes))
        spare = max(map(spare_rows, shapes))
        needed = slot_length(context_length + spare)
        if max_running_requests < 1:
            raise UsageError(f"max_running_requests must be at least 1, got {max_running_requests}.")
        rows = needed * max_running_requests if kv_rows is None else kv_rows
        if rows < needed:
            raise UsageError(
                f"The KV cache holds {rows} tokens, and one request with a context of {context_length} and its drafts "
                f"takes {needed}: give it more memory, or a shorter context_length."
            )
        self.runner = Runner(target, drafter, rows, catch_up)
        chunk = chunked_prefill_size or PREFILL_CHUNK.get(target.device.type, PREFILL_CHUNK["cuda"])
        follow = self.policy.follow if drafter else lambda: False
        self.scheduler = Scheduler(rows, spare, max_running_requests, chunk, follow, prefix_caching)
        self._numbers = itertools.count()

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
        ids, vocab = (*request.prompt_ids, *request.output_ids), self.target.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            raise RequestError(f"The prompt has token ids outside the target's 0 to {vocab - 1}.")
        check_bias(request.sampling, vocab)
        if self.scheduler.find(request.id):
            raise RequestError(f"A request with the id {request.id!r} is still being answered: ids must differ.")
        if request.sampling.stop and self.tokenizer is None:
            raise RequestError("Stop strings need a tokenizer, and this engine has none: use stop_token_ids.")
        self.scheduler.add(self._sequence(request))

    @torch.inference_mode()
    def step(self, hear: Callable[[list[Output]], None] | None = None) -> list[Output]:
        """Reads pieces of new prompts, and moves every running sequence on by one draft.

        ``hear`` is told of the first tokens at once, before the others go on; what it heard is not returned.
        """
        try:
            plan = self.scheduler.schedule()
            self.runner.arrange(plan.moves)
        except BaseException:  # an interruption, too: what the scheduler planned and what is in memory differ now
            self.reset()
            raise
        outputs = [output for group in plan.groups for output in self._read(group)]
        if plan.decode:
            if hear is not None:
                hear(outputs)
                outputs = []
            outputs += self._decode(self._batch(plan))
        if self.idle:
            self.scheduler.check()
        return outputs

    def compile(self, report: Callable[[str, float], None] = lambda what, share: None) -> None:
        """Compiles steps before they are needed: minutes on a machine's first time, then seconds each.

        Other steps run as they are. ``report`` hears what is being done, and how much of it all is behind.
        """
        if not self.target.compilable:
            return
        sizes = compiled_sizes(self.scheduler.max_running, self.policy.shapes if self.drafter else ())
        report("compiling steps: prompts", 0.0)
        try:
            self.runner.compile_reading()
        except Exception as error:  # a model may do other things with other numbers of tokens
            logger.warning("Prompts are read without compiled steps (%s: %s)", type(error).__name__, one_line(error))
        for done, (sequences, shape) in enumerate(sizes, start=1):
            report(f"compiling steps: {sequences} x {describe(shape)}", done / (len(sizes) + 1))
            self.runner.compile(sequences, shape)

    def abort(self, request_id: str) -> None:
        """Drops a request, waiting or running; unknown ids are none of our business any more."""
        if (sequence := self.scheduler.find(request_id)) is not None:
            sequence.finish_reason = "abort"
            self.scheduler.finish(sequence, sequence.length)

    def forget(self) -> None:
        """Drops the beginnings that finished requests have left for others: the weights may have changed."""
        self.scheduler.left.clear()

    @torch.inference_mode()
    def reset(self) -> None:
        """Drops all requests, and all that memory holds: for whoever caught what ``step`` raised."""
        self.scheduler.forget()
        self.runner.wipe()

    def stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return (*(() if sampling.ignore_eos else self.eos_ids), *sampling.stop_token_ids)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    # Prompts

    def _read(self, pieces: Many[Chunk]) -> list[Output]:
        """Reads pieces of prompts in one pass; with a prompt's last one comes the first token of its answer."""
        sequences, starts = [piece.sequence for piece in pieces], [piece.start for piece in pieces]
        try:
            batch = self.runner.batch(sequences[0].slot, sequences, starts, self.scheduler.readable)
            draft = self.runner.roots(batch)
            paths = self.runner.paths(batch, draft)
            output = self.runner.read(pieces)
            draft, allowed = self.runner.constrain(batch, draft, paths)
            choice = choose(output.logits, batch.choosing, draft, allowed)
            facts = torch.cat((choice.tokens, choice.finite.long()), dim=1).tolist()
        except Exception as error:
            if len(pieces) == 1:
                return [self._fail(sequences[0], error)]
            return [output for piece in pieces for output in self._read([piece])]  # whose fault is it?
        self.runner.take(pieces, output)
        outputs = []
        for row, (sequence, (token, finite)) in enumerate(zip(sequences, facts, strict=True)):
            complete = sequence.length == len(sequence.ids)
            if not finite or (complete and token < 0):  # now: in a prefix, or after a new layout, NaN would meet others
                outputs.append(self._fail(sequence, no_choice(bool(finite), sequence.output_index)))
            elif complete:
                sequence.decoding = True
                outputs.append(self._emit(sequence, [token], output.logits, row, [0]))
        return outputs

    # Answers

    def _batch(self, plan: Plan) -> Batch:
        rows: list[Sequence | None] = [None] * plan.bucket
        for sequence in plan.decode:
            rows[sequence.slot] = sequence
        starts = self.scheduler.starts(plan.bucket, self.scheduler.spare)
        return self.runner.batch(0, rows, starts, plan.length)

    def _decode(self, batch: Batch) -> list[Output]:
        decision = self.policy.decide(self._view(batch))
        try:
            step = self._draft_and_verify(batch, decision)
        except Exception as error:  # whose fault is it?
            members = batch.members
            if len(members) == 1 and decision.shape is None:
                return [self._fail(members[0][1], error)]
            return [self._alone(sequence) for _, sequence in members]
        drafted = [row for row, sequence in batch.members if sequence.follows]
        outputs = [self._take(batch, step, row, sequence) for row, sequence in batch.members]
        self._observe(batch, step, drafted)
        self._follow(batch, decision)
        return outputs

    def _draft_and_verify(self, batch: Batch, decision: Decision) -> Step:
        """One target pass, with or without a draft. No sequence knows of it yet: what raises here can be redone."""
        times = [time.perf_counter()]
        draft = None
        if decision.shape:
            try:
                draft = self.runner.propose(batch, decision.shape)
            except Exception as error:
                self.runner.give_up([s for _, s in batch.members if s.follows], error)
                decision = Decision(None, "plain: the drafter failed")
        if draft is None:
            draft = self.runner.roots(batch)
        paths = self.runner.paths(batch, draft)
        times.append(time.perf_counter())
        output = self.runner.verify(batch, draft)
        times.append(time.perf_counter())
        draft, allowed = self.runner.constrain(batch, draft, paths)  # while a GPU is at it
        choice = choose(output.logits, batch.choosing, draft, allowed)
        acceptance = accept(draft, choice.tokens)
        self.runner.keep(batch, draft, acceptance, output.states)
        finite = choice.finite.gather(1, acceptance.path.gather(1, acceptance.counts[:, None] - 1))
        # one transfer for all that the host must know
        facts = torch.cat((acceptance.counts[:, None], finite.long(), acceptance.tokens, acceptance.path), dim=1)
        return Step(decision, facts.tolist(), output.logits, acceptance.tokens.shape[1], times)

    def _alone(self, sequence: Sequence) -> Output:
        """One sequence by itself, plainly: what broke a step may be another sequence, or a token of a draft."""
        try:
            self.runner.drop_draft(sequence)
            batch = self.runner.batch(sequence.slot, [sequence], [sequence.length], self.scheduler.readable)
            step = self._draft_and_verify(batch, Decision(None, "alone after a fault"))
        except Exception as error:
            return self._fail(sequence, error)
        return self._take(batch, step, 0, sequence)

    def _take(self, batch: Batch, step: Step, row: int, sequence: Sequence) -> Output:
        """What a step made of one sequence."""
        tokens, path, finite = step.of(row)
        if tokens[-1] < 0:  # nothing can be chosen; plain decoding may not meet what broke a draft, or not yet
            if step.decision.shape is None:
                return self._fail(sequence, no_choice(finite, sequence.output_index))
            return self._alone(sequence)
        shape = step.decision.shape if sequence.follows else None
        sequence.length += len(tokens)
        if sequence.follows:
            sequence.pending += len(tokens)
            if sequence.pending > self.runner.catch_up_most:  # steps that failed put catching up off for too long
                sequence.give_up()
        output = self._emit(sequence, tokens, step.logits, row, path)
        if shape:
            sequence.stats.record(shape.num_steps, shape.num_draft_tokens - 1, len(tokens) - 1, len(output.emitted))
        return output

    def _follow(self, batch: Batch, decision: Decision) -> None:
        """After many plain steps the drafter reads what has piled up, or gives up those that it is behind with."""
        behind = [s for _, s in batch.members if s.slot >= 0 and s.follows and s.pending >= CATCH_UP]
        if not behind or decision.shape:
            return
        if decision.follow:
            running = [s if s is not None and s.slot >= 0 else None for s in batch.rows]
            try:
                return self.runner.catch_up(self.runner.batch(batch.slot, running, batch.starts, batch.length))
            except Exception as error:  # of the drafter's memory, say
                return self.runner.give_up(behind, error)
        for sequence in behind:
            sequence.give_up()

    def _emit(self, sequence: Sequence, tokens: list[int], logits: torch.Tensor, row: int, path: list[int]) -> Output:
        """Appends tokens until the answer ends; what was accepted behind its end is dropped.

        They were chosen at the nodes ``path`` of ``logits[row]``.
        """
        try:
            reports: list[tuple[Any, ...]] = [()] * len(tokens)
            if (wanted := sequence.sampling.logprobs) is not None:
                reports = [(own, tuple(top)) for own, top in logprobs(logits[row, path], torch.tensor(tokens), wanted)]
            emitted, last = [], len(tokens) - 1
            for i, token in enumerate(tokens):
                text = sequence.append(token)
                emitted.append(Emitted(token, text, i < last, *reports[i]))
                if sequence.finish_reason is not None:
                    break
            if sequence.finish_reason is None:
                return Output(sequence.request.id, tuple(emitted))
            tail = sequence.flush()
        except Exception as error:  # a tokenizer's, say
            return self._fail(sequence, error)
        self.scheduler.finish(sequence, min(sequence.length, len(sequence.ids)))
        return Output(
            sequence.request.id,
            tuple(emitted),
            sequence.finish_reason,
            tail,
            stats=sequence.stats,
            cached_tokens=min(sequence.cached, sequence.given),  # what it left itself when put back does not count
            stop_reason=sequence.stop_reason,
        )

    def _fail(self, sequence: Sequence, error: Exception) -> Output:
        """Ends one request; its slot is wiped, since it may hold NaN."""
        if not isinstance(error, EyasError):
            what = f"{type(error).__name__}: {error}"
            error, cause = EyasError(f"The request failed while it was being answered ({what})."), error
            error.__cause__ = cause
        sequence.finish_reason = "error"
        slot = sequence.slot
        self.scheduler.finish(sequence, 0)
        self.runner.clear(slot)
        try:
            tail = sequence.text.flush() if sequence.text else ""
        except Exception:  # it may be the tokenizer that failed
            tail = ""
        return Output(sequence.request.id, (), "error", tail, error, sequence.stats)

    # What the policy sees

    def _view(self, batch: Batch) -> BatchView:
        return BatchView(
            sequences=len(batch.members),
            bucket=len(batch.rows),
            length=batch.length,
            drafted=sum([s.follows for _, s in batch.members]),
            room=max([s.room for _, s in batch.members]),
        )

    def _observe(self, batch: Batch, step: Step, drafted: list[int]) -> None:
        """Tells the policy what came of a step, in which the rows ``drafted`` were drafted for, if any."""
        shape = step.decision.shape
        depth = shape.num_steps if shape else 0
        hits = [step.facts[row][0] - 1 for row in drafted]
        begin, proposed, verified = step.times
        self.policy.observe(
            StepReport(
                step.decision,
                B=len(batch.rows),
                T=shape.num_draft_tokens if shape else 1,
                S=batch.length,
                propose_seconds=proposed - begin,
                verify_seconds=verified - proposed,
                rest_seconds=time.perf_counter() - verified,
                draft_depth=depth,
                reached=[sum(h >= d for h in hits) for d in range(depth)],
                accepted=[sum(h > d for h in hits) for d in range(depth)],
                emitted=sum([step.facts[row][0] for row, _ in batch.members]),
            )
        )

    def _sequence(self, request: Request) -> Sequence:
        sampling, vocab = request.sampling, self.target.vocab_size
        history = None
        if needs_history(sampling):
            history = TokenHistory.from_tokens(request.prompt_ids, request.output_ids, vocab, self.target.device)
        grammar = None
        if sampling.structured_outputs is not None:
            grammar = self.grammars.start(sampling.structured_outputs, request.output_ids)
        text = TextStream(self.tokenizer, sampling.stop) if self.tokenizer is not None else None
        if text is not None:
            for count, token in enumerate(request.output_ids, start=1):
                text.push(token, may_stop=count >= sampling.min_tokens)
        return Sequence(
            request,
            number=next(self._numbers),
            limit=self.context_length,
            stop_ids=self.stop_ids(sampling),
            text=text,
            history=history,
            grammar=grammar,
            image_key=image_key(request.images) if request.images else "",
        )


@dataclass(frozen=True)
class Step:
    """What one target pass found, before any sequence took it."""

    decision: Decision
    facts: list[list[int]]  # [B][count, finite, tokens [P], path [P]]
    logits: torch.Tensor  # [B, N, V]
    width: int  # P
    times: list[float]  # begin, drafted, verified

    def of(self, row: int) -> tuple[list[int], list[int], bool]:
        """The tokens of one sequence, the nodes they were chosen at, and whether the last one's logits are sound."""
        facts = self.facts[row]
        count, path = facts[0], 2 + self.width
        return facts[2 : 2 + count], facts[path : path + count], bool(facts[1])


def compiled_sizes(most: int, shapes: Many[DraftShape]) -> list[tuple[int, DraftShape | None]]:
    """Batches and drafts worth the time: all chains for one sequence, for many the short ones, which may pay.

    Longer ones first: their steps take shorter ones too.
    """
    sizes: list[tuple[int, DraftShape | None]] = []
    for sequences, longest in ((1, 64), (4, 3), (16, 1), (32, 1)):
        if sequences <= slot_bucket(most):
            chains = [s for s in shapes if s.eagle_topk == 1 and (s.num_steps <= longest or len(shapes) == 1)]
            sizes += [(sequences, s) for s in (*sorted(chains, key=lambda s: -s.num_steps), None)]
    return sizes


def spare_rows(shape: DraftShape) -> int:
    """Rows behind a sequence for a draft: its nodes, all that the drafter tries for them, or a catching up."""
    return max(shape.num_draft_tokens, drafted_rows(shape) + 1, CATCH_UP, shape.num_steps + 2)


def rows_for(context_length: int, shape: DraftShape | None = None) -> int:
    """Rows of KV that one request of a whole context takes."""
    return slot_length(context_length + spare_rows(shape or DraftShape()))


def image_key(images: Mapping[str, Any]) -> str:
    """The same for the same pixels and layout, and practically never for others.

    Types of tokens are left out: they say of the prompt's tokens what their ids say, for a prompt of one length only.
    """
    digest = hashlib.sha256()
    for name in sorted(name for name in images if not name.endswith("token_type_ids")):
        value = images[name]
        if not isinstance(value, torch.Tensor):  # what generate made of them: nothing to recognise them by
            return uuid.uuid4().hex
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
