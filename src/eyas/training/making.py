"""Data in the making: conversations answered by the target, many at a time, each written down once it is whole."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np

from eyas.core import SamplingParams, UsageError
from eyas.training.answering import Answer, Answerer, Prompt, Refused
from eyas.training.conversation import Chat, Turn, stitch
from eyas.training.dataset import DataError, DatasetWriter, Row
from eyas.training.filters import Seen, end_at_sentence, loop_start, prompt_problem
from eyas.training.heldout import HELDOUT
from eyas.training.selfmade import Seed, Steering, is_whole
from eyas.training.sources import Conversation

SHORTEST_ANSWER = 2  # tokens: one word, and the end
TRIES = 64  # pieces of work after which a target that writes nothing of use is told so
RECENT = 4 * TRIES  # the last of them, by which one is judged that has written what it knows
SHOWN = 400  # characters of a prompt that are kept for those who look at the data

Progress = Callable[["Making"], None]


@dataclass(frozen=True)
class Settings:
    """How prompts and answers are sampled, temperatures mixed, and how long they may get."""

    temperatures: tuple[float, ...] = (0.0, 0.3, 0.7, 1.0)
    prompt_temperatures: tuple[float, ...] = (0.7, 1.0)
    top_p: float = 1.0
    max_answer_tokens: int = 512
    max_prompt_tokens: int = 192  # of one that the target writes
    max_length: int = 2048

    def __post_init__(self) -> None:
        for temperature in (*self.temperatures, *self.prompt_temperatures):
            SamplingParams(temperature=temperature, top_p=self.top_p)
        if not (self.temperatures and self.prompt_temperatures):
            raise UsageError("There must be one temperature at least.")
        if min(self.max_answer_tokens, self.max_prompt_tokens) < 8 or self.max_length < 32:
            raise UsageError("Answers and prompts need 8 tokens at least, and conversations 32.")


class Dropped(Exception):
    """A conversation of which nothing is kept: why, in the words it is counted by, and what else there is to say."""

    def __init__(self, why: str, detail: str = ""):
        super().__init__(why)
        self.detail = detail


@dataclass
class Making:
    """How far it is."""

    conversations: int = 0  # kept, earlier sittings included
    loss_tokens: int = 0  # of this sitting
    dropped: int = 0
    trouble: str = ""


class Maker:
    """Lets a target write conversations, or answer those of others."""

    def __init__(self, chat: Chat, answerer: Answerer, settings: Settings, seen: Seen | None = None):
        self.chat, self.answerer, self.settings = chat, answerer, settings
        self._seen = seen if seen is not None else Seen()
        self._measured = measured()

    async def selfmade(self, seed: Seed) -> list[Row]:
        """A conversation that the target holds with itself."""
        talk = Talk(self, _system(seed.system), seed.noise)
        asked = []
        for turn, (begun, temperature) in enumerate(zip(seed.begun, seed.temperatures, strict=True)):
            try:
                asked.append(await talk.ask_itself(begun, seed.prompt_temperature, first=turn == 0))
            except Dropped:
                if turn:
                    break  # what was said before is a conversation of its own
                raise
            if not await talk.answer(temperature):
                break
        facts = {"kind": seed.kind, "temperatures": seed.temperatures[: len(talk.turns)], "prompt": asked[0][:SHOWN]}
        return talk.rows("selfmade", facts)

    async def regenerated(self, conversation: Conversation, seed: int) -> list[Row]:
        """Every answer of the assistant written anew by the target, each upon those before."""
        self._check(conversation)
        random = Random(f"{seed}:{conversation.line}")
        talk = Talk(self, [dict(m) for m in conversation.messages if m["role"] == "system"], random.getrandbits(31))
        asked = [m for m in conversation.messages if m["role"] == "user"]
        temperatures = []
        for message in asked:
            talk.messages.append(dict(message))
            temperatures.append(random.choice(self.settings.temperatures))
            if not await talk.answer(temperatures[-1]):
                break
        facts = {"line": conversation.line, "temperatures": temperatures[: len(talk.turns)]}
        return talk.rows("jsonl", facts | {"prompt": asked[0]["content"][:SHOWN]})

    def kept(self, conversation: Conversation) -> list[Row]:
        """A conversation as it is, with answers that the target gave elsewhere."""
        self._check(conversation)
        messages = list(conversation.messages)
        if messages[-1]["role"] == "user":
            messages.pop()
        turns = [turn for turn in self.chat.answered(messages) if self._fits(turn)]
        first = next(m["content"] for m in messages if m["role"] == "user")
        return make_rows(turns, "jsonl", {"line": conversation.line, "prompt": first[:SHOWN]})

    def _check(self, conversation: Conversation) -> None:
        if conversation.problem:
            raise Dropped(conversation.problem)
        if any(m["role"] == "user" and self._measured.has(m["content"]) for m in conversation.messages):
            raise Dropped("prompt that eyas eval measures on")

    def _fits(self, turn: Turn) -> bool:
        return len(turn.prompt) + len(turn.answer) <= self.settings.max_length

    def new(self, prompt: str) -> bool:
        return self._seen.add(prompt)


class Talk:
    """One conversation while it grows."""

    def __init__(self, maker: Maker, messages: list[dict[str, str]], noise: int):
        self._maker, self.messages, self._noise = maker, messages, noise
        self.turns: list[Turn] = []

    async def ask_itself(self, begun: str, temperature: float, first: bool) -> str:
        """The user's next message, which the target writes from where it has ``begun``. Raises Dropped."""
        chat, settings = self._maker.chat, self._maker.settings
        text, problem = begun.strip(), ""
        if not is_whole(begun):
            begun = begun.rstrip(" ")  # most tokens bring the space before their word with them
            before = chat.user_turn(self.messages, begun)
            room = min(settings.max_prompt_tokens, settings.max_length - len(before))
            if room < 8:
                raise Dropped("no room for another prompt")
            answer = await self._complete(Prompt(before), temperature, room, chat.stop_ids)
            text = chat.user_message(before, begun, answer.ids)
            if not answer.ended and not _stopped(answer, chat):
                text = end_at_sentence(text, least=len(begun.strip()))
                problem = "" if text else "endless prompt"
            problem = problem or prompt_problem(text, answer.ids)
        if not problem and first and not self._maker.new(text):
            problem = "near-duplicate prompt"
        if problem:
            raise Dropped(problem)
        self.messages.append({"role": "user", "content": text})
        return text

    async def answer(self, temperature: float) -> bool:
        """The target's answer. False where the conversation ends with it: cut off, looping, or with no more room.

        A loop is cut before it, with what led to it kept: the target does write that, under greedy decoding often.
        """
        chat, settings = self._maker.chat, self._maker.settings
        prompt = chat.prompt(self.messages)
        room = min(settings.max_answer_tokens, settings.max_length - len(prompt))
        if room < SHORTEST_ANSWER:
            if self.turns:
                return False
            raise Dropped("prompt longer than the rows may be")
        answer = await self._complete(Prompt(prompt, list(self.messages)), temperature, room, chat.end_ids)
        start = loop_start(answer.ids)
        ids = answer.ids if start is None else answer.ids[:start]
        if len(ids) < SHORTEST_ANSWER:
            if self.turns:
                return False
            raise Dropped("empty answer")
        self.turns.append(Turn(prompt, ids))
        self.messages.append({"role": "assistant", "content": chat.text(ids)})
        return answer.ended and start is None

    async def _complete(self, prompt: Prompt, temperature: float, room: int, stop: Sequence[int]) -> Answer:
        self._noise += 1
        sampling = SamplingParams(
            temperature=temperature,
            top_p=self._maker.settings.top_p,
            max_tokens=room,
            seed=self._noise,
            stop_token_ids=tuple(stop),
        )
        try:
            return await self._maker.answerer.complete(prompt, sampling)
        except Refused as error:
            raise Dropped("refused prompt", str(error)) from error

    def rows(self, source: str, facts: dict[str, Any]) -> list[Row]:
        return make_rows(self.turns, source, facts)


def make_rows(turns: Sequence[Turn], source: str, facts: dict[str, Any]) -> list[Row]:
    if not turns:
        raise Dropped("no answer that fits")
    return [Row(ids, mask, source, facts | {"turns": len(turns)}) for ids, mask in stitch(turns)]


def _system(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def _stopped(answer: Answer, chat: Chat) -> bool:
    return any(i in chat.special for i in answer.ids)


Job = tuple[str, Callable[[], Awaitable[list[Row]]]]  # its name, and how it is done


def selfmade_jobs(maker: Maker, steering: Steering) -> Iterator[Job]:
    number = 0
    while True:
        yield f"selfmade:{number}", partial(maker.selfmade, steering.at(number))
        number += 1


def conversation_jobs(
    maker: Maker, conversations: Iterator[Conversation], seed: int, keep_answers: bool
) -> Iterator[Job]:
    async def done(conversation: Conversation) -> list[Row]:
        if not keep_answers:
            return await maker.regenerated(conversation, seed)
        try:
            return maker.kept(conversation)
        except DataError as error:
            raise DataError(f"Line {conversation.line}: {error}") from error

    for conversation in conversations:
        yield f"line:{conversation.line}", partial(done, conversation)


class Production:
    """Jobs done ``concurrency`` at a time, until there are ``wanted`` conversations or no more jobs."""

    def __init__(self, writer: DatasetWriter, jobs: Iterator[Job], answerer: Answerer, *, wanted: int | None):
        self._writer, self._answerer, self._wanted = writer, answerer, wanted
        self._jobs = (job for job in jobs if job[0] not in writer.done)
        self._reasons, self._details = Counter[str](), dict[str, str]()
        self._recent: deque[bool] = deque(maxlen=RECENT)  # whether each of the last pieces could be used
        self.progress = Making(conversations=writer.conversations)

    async def run(self, concurrency: int, report: Progress) -> None:
        """Raises what ends all jobs; what was done before is written."""
        pending: set[asyncio.Task[None]] = set()
        try:
            while True:
                while len(pending) < concurrency and (job := self._next(len(pending))):
                    pending.add(asyncio.create_task(self._do(*job)))
                if not pending:
                    return
                done, pending = await asyncio.wait(pending, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                self._give_up_on_nothing()
                self.progress.trouble = self._answerer.trouble
                report(self.progress)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _next(self, running: int) -> Job | None:
        enough = self._wanted is not None and self.progress.conversations + running >= self._wanted
        return None if enough else next(self._jobs, None)

    async def _do(self, item: str, work: Callable[[], Awaitable[list[Row]]]) -> None:
        rows, reason = list[Row](), None
        try:
            rows = await work()
        except Dropped as why:
            reason = str(why)
            self._reasons[reason] += 1
            self._details.setdefault(reason, why.detail)
            self.progress.dropped += 1
        self._recent.append(bool(rows))
        self._writer.append(rows, item, reason)
        if rows:
            self.progress.conversations += 1
            self.progress.loss_tokens += sum(int(np.count_nonzero(row.mask)) for row in rows)

    def _give_up_on_nothing(self) -> None:
        tried, kept = len(self._recent), sum(self._recent)
        if tried >= TRIES and kept < 0.02 * tried:
            common = self._reasons.most_common(3)
            reasons = ", ".join(f"{reason} ({count})" for reason, count in common)
            detail = self._details[common[0][0]]
            raise DataError(
                f"Of the last {tried} conversations {kept} can be used: {reasons}{f': {detail}' if detail else ''}. "
                "Other prompts (--prompts) or other --prompt-temperatures may do better."
            )


async def make(
    writer: DatasetWriter,
    jobs: Iterator[Job],
    answerer: Answerer,
    *,
    wanted: int | None,
    concurrency: int,
    report: Progress = lambda progress: None,
) -> None:
    """Does all jobs that are not done yet. What is written stays written, whatever this raises."""
    try:
        await Production(writer, jobs, answerer, wanted=wanted).run(concurrency, report)
    finally:
        await answerer.close()


def measured() -> Seen:
    """The prompts that ``eyas eval`` measures on: they are never trained on."""
    seen = Seen()
    for prompt in (prompt for prompts in HELDOUT.values() for prompt in prompts):
        seen.add(prompt)
    return seen


def remember(writer: DatasetWriter) -> Seen:
    """The prompts of earlier sittings, and those that are never trained on."""
    seen = measured()
    for row in writer.rows():
        if row.source == "selfmade":
            seen.add(row.provenance.get("prompt", ""))
    return seen
