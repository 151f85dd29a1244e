"""What data is to be made, and the whole way from there to a data set."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from eyas.core import TargetError, UsageError, one_line
from eyas.training.answering import Answerer
from eyas.training.conversation import Chat
from eyas.training.dataset import Dataset, DatasetWriter, Manifest
from eyas.training.making import Job, Maker, Progress, Settings, conversation_jobs, make, remember, selfmade_jobs
from eyas.training.selfmade import KINDS, Steering
from eyas.training.sources import file_hash, read_conversations
from eyas.training.statistics import diversity
from eyas.training.topics import TOPICS

if TYPE_CHECKING:
    from eyas.engine.llm import LLM


@dataclass(frozen=True)
class Described:
    """What must be known of a target to make data with it: no weights."""

    name: str
    tokenizer: Any
    vocab_size: int
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, llm: LLM) -> Described:
        from eyas.engine.llm import eos_ids

        return cls(llm.name, llm.tokenizer, llm.target.vocab_size, eos_ids(llm.target.model, llm.tokenizer))

    @classmethod
    def read(cls, name: str, trust_remote_code: bool = False) -> Described:
        """From the target's files, whoever runs it. Raises TargetError where they do not say."""
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        from eyas.engine.llm import eos_ids
        from eyas.target.gguf import read_gguf_tokenizer
        from eyas.target.source import find_source

        source = find_source(name)
        options = {**source.options, "trust_remote_code": trust_remote_code}
        try:
            if source.gguf:
                config = AutoConfig.from_pretrained(source.place, gguf_file=source.gguf.name)
                tokenizer: Any = read_gguf_tokenizer(source.gguf, config)
            else:
                config = AutoConfig.from_pretrained(source.place, **options)
                tokenizer = AutoTokenizer.from_pretrained(source.place, **options)
        except Exception as error:  # other libraries' loaders raise anything
            raise TargetError(f"cannot read config and tokenizer of {name!r}: {one_line(error)}") from error
        text = config.get_text_config()
        try:
            generation = GenerationConfig.from_pretrained(source.place, **source.options)
        except OSError:  # it has none of its own
            generation = GenerationConfig(eos_token_id=getattr(text, "eos_token_id", None))
        ends = eos_ids(SimpleNamespace(generation_config=generation), tokenizer)
        return cls(name, tokenizer, text.vocab_size, ends)


@dataclass(frozen=True)
class Commission:
    """What is to be made. ``conversations`` None is all that the file ``prompts`` has; without a file, the target asks.

    ``systems`` are the system prompts of self-made conversations, None for the built-in ones.
    """

    out: Path
    conversations: int | None = None
    prompts: Path | None = None
    keep_answers: bool = False
    seed: int = 0
    kinds: tuple[str, ...] = tuple(KINDS)
    topics: tuple[str, ...] = TOPICS
    systems: tuple[str, ...] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    concurrency: int = 32

    def __post_init__(self) -> None:
        if self.keep_answers and self.prompts is None:
            raise UsageError("Answers can be kept only where a file has some (--prompts).")
        if self.prompts is None and self.conversations is None:
            raise UsageError("How many conversations shall the target make? Say --conversations.")
        if self.conversations is not None and self.conversations < 1:
            raise UsageError(f"--conversations must be at least 1, got {self.conversations}.")
        if self.concurrency < 1:
            raise UsageError(f"--concurrency must be at least 1, got {self.concurrency}.")
        _ = self.steering  # says what is wrong with it
        if self.prompts is not None:
            for _ in read_conversations(self.prompts):  # a bad line is found before hours of answering, not after
                pass

    @property
    def steering(self) -> Steering:
        settings = self.settings
        return Steering(
            self.seed, settings.temperatures, settings.prompt_temperatures, self.kinds, self.topics, self.systems
        )

    def recipe(self) -> dict[str, Any]:
        """What must stay the same for more of the same data."""
        shared = {"seed": self.seed, "template": dict(self.template)}
        if self.prompts is not None:
            return shared | {"prompts": file_hash(self.prompts), "keep_answers": self.keep_answers}
        topics = hashlib.sha256("\n".join(self.topics).encode()).hexdigest()
        systems = None if self.systems is None else list(self.systems)
        return shared | {"kinds": list(self.kinds), "topics": topics, "systems": systems}


def make_data(
    target: Described,
    wanted: Commission,
    answerer: Callable[[Chat], Answerer],
    report: Progress = lambda progress: None,
) -> Dataset:
    """Makes the data, or goes on where an earlier run of the same commission was stopped, however it was.

    Raises DataError or UsageError; what was made before stays.
    """
    chat = Chat(target.tokenizer, target.end_ids, wanted.template)
    manifest = Manifest.of(
        target.name,
        target.tokenizer,
        target.vocab_size,
        sampling=_plain(asdict(wanted.settings)),
        recipe=wanted.recipe(),
    )
    writer = DatasetWriter(wanted.out, manifest)
    try:
        asyncio.run(_make(writer, chat, wanted, answerer, report))
        return writer.finish(**diversity(writer.rows()))
    finally:
        writer.close()


async def _make(
    writer: DatasetWriter,
    chat: Chat,
    wanted: Commission,
    answerer: Callable[[Chat], Answerer],
    report: Progress,
) -> None:
    who = answerer(chat)
    maker = Maker(chat, who, wanted.settings, remember(writer))
    await make(
        writer,
        _jobs(maker, wanted),
        who,
        wanted=wanted.conversations,
        concurrency=wanted.concurrency,
        report=report,
    )


def _jobs(maker: Maker, wanted: Commission) -> Iterator[Job]:
    if wanted.prompts is None:
        return selfmade_jobs(maker, wanted.steering)
    return conversation_jobs(maker, read_conversations(wanted.prompts), wanted.seed, wanted.keep_answers)


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: lists for tuples."""
    return {key: list(item) if isinstance(item, tuple) else item for key, item in value.items()}
