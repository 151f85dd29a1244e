"""From messages and prompts to token ids. This takes time, and belongs into a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyas.core import RequestError
from eyas.server.errors import ApiError, refused
from eyas.server.images import ImageReader
from eyas.server.protocol import ChatRequest, CompletionRequest, ImageUrl, Message, Part, check_within, prompts_of
from eyas.server.templates import check_settings
from eyas.server.tokens import TokenizeRequest

if TYPE_CHECKING:
    from eyas.engine.llm import LLM

ROLES = {"developer": "system"}  # OpenAI's new word, which no chat template knows


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    images: Mapping[str, Any] | None = None


class Encoder:
    """A target's tokenizer, chat template and image processor, and how much they may be given."""

    def __init__(self, llm: LLM):
        self._llm, self._sees = llm, llm.processor is not None
        llm.tokenizer("")  # it settles its settings now: later, another thread may be reading them
        longest = max(map(len, llm.tokenizer.get_vocab()))
        self._most = llm.context_length * longest  # characters: more can never fit

    def chat(self, asked: ChatRequest) -> list[Prompt]:
        """Raises ApiError for messages that the target or its chat template cannot take."""
        return [self._fitting(self._chat(asked.messages, asked.chat_template_kwargs), "messages")]

    def completion(self, asked: CompletionRequest) -> list[Prompt]:
        """One or several: text, token ids, or a list of either."""
        prompts = prompts_of(asked.prompt)
        if not prompts:
            raise refused("prompt", "prompt is an empty list: give at least one.")
        for prompt in prompts:
            self._check_text(prompt if isinstance(prompt, str) else "")
        return [self._fitting(self._encode(prompt, "prompt"), "prompt") for prompt in prompts]

    def tokens(self, asked: TokenizeRequest) -> tuple[list[int], list[str] | None]:
        """Of text or messages, also of more than the context holds; their names where these are asked for."""
        tokenizer = self._llm.tokenizer
        if asked.messages is not None:
            ids = self._chat(asked.messages, asked.chat_template_kwargs).ids
        else:
            assert asked.prompt is not None
            self._check_text(asked.prompt)
            ids = list(tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens)["input_ids"])
        return ids, tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None

    def text(self, ids: Sequence[int]) -> str:
        """Special tokens included. Raises ApiError for tokens that there are not."""
        room, vocab = self._llm.context_length, self._llm.target.vocab_size
        if len(ids) > room:
            raise refused("tokens", f"{len(ids):,} tokens are more than the context's {room:,}: ask for fewer at once.")
        if any(not 0 <= i < vocab for i in ids):
            raise refused("tokens", f"There are token ids outside the target's 0 to {vocab - 1}.")
        return self._llm.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _chat(self, given: Sequence[Message], settings: Mapping[str, Any]) -> Prompt:
        check_settings(settings, self._llm.tokenizer)
        reader = ImageReader()
        messages = [self._message(message, f"messages[{n}]", reader) for n, message in enumerate(given)]
        if any(isinstance(message["content"], list) for message in messages):  # templates take parts or text, not both
            messages = [{**message, "content": as_parts(message["content"])} for message in messages]
        self._check_length("messages", sum(len(text_of(message.content)) for message in given))
        return self._encode(messages, "messages", settings)

    def _encode(self, content: Any, param: str, settings: Mapping[str, Any] | None = None) -> Prompt:
        try:
            return Prompt(*self._llm.encode(content, settings))
        except RequestError as error:
            raise refused(param, str(error)) from error

    def _fitting(self, prompt: Prompt, param: str) -> Prompt:
        if not prompt.ids:
            raise refused(param, "The prompt is empty: give at least one token.")
        count, room = len(prompt.ids), self._llm.context_length
        if count >= room:
            raise too_long(param, f"{count:,} tokens, and the context holds {room:,} with the answer")
        return prompt

    def _check_text(self, prompt: str) -> None:
        check_unicode(prompt, "prompt")
        self._check_length("prompt", len(prompt))

    def _check_length(self, param: str, characters: int) -> None:
        """Before it is split into tokens, which takes time."""
        if characters > self._most:
            raise too_long(param, f"{characters:,} characters, more than {self._llm.context_length:,} tokens can be")

    def _message(self, message: Message, where: str, reader: ImageReader) -> dict[str, Any]:
        check_within(message, where)
        content: Any = message.content
        if content is None:
            if message.role != "assistant":
                raise refused(f"{where}.content", f"{where}.content is required.", "missing_required_parameter")
            content = ""
        check_unicode(text_of(content), f"{where}.content")
        if isinstance(content, list):
            parts = [part_of(part, f"{where}.content[{n}]", reader) for n, part in enumerate(content)]
            plain = not self._sees and all(part["type"] == "text" for part in parts)
            content = "\n".join(part["text"] for part in parts) if plain else parts
        return {"role": ROLES.get(message.role, message.role), "content": content}


def part_of(part: Part, where: str, reader: ImageReader) -> dict[str, Any]:
    check_within(part, where)
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == "image_url" and part.image_url is not None:
        image = ImageUrl(url=part.image_url) if isinstance(part.image_url, str) else part.image_url
        check_within(image, f"{where}.image_url")
        return {"type": "image", "image": reader.read(image.url, where)}
    raise refused(where, f"{where} must be {{type: text, text}} or {{type: image_url, image_url: {{url}}}}.")


def too_long(param: str, found: str) -> ApiError:
    return refused(param, f"The prompt has {found}: shorten it.", "context_length_exceeded")


def check_unicode(text: str, where: str) -> None:
    """JSON can say half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refused(where, f"{where} is not valid unicode: half of a surrogate pair is in it.") from error


def as_parts(content: str | Sequence[Any]) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(content: str | Sequence[Part] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
