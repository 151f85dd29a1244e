"""Chat messages to token ids, and their images to what a multimodal target's forward takes."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from eyas.core import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

# What a processor returns beside tensors about images: the engine makes these itself.
TEXT_KEYS = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position"})

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 50_000_000  # a decoded image takes 3 bytes a pixel, however small its file is
MAX_FILE = 50_000_000
BROKEN = (OSError, ValueError, SyntaxError, TypeError, LookupError, struct.error)  # Pillow's words for a broken file

GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag that transformers adds to Jinja
# What a template raises for messages and settings that it was not made for.
MISTAKES = (TemplateError, ValueError, TypeError, KeyError, IndexError, ArithmeticError, AttributeError)


def open_image(file: str | Path) -> Image:
    """A local picture, upright and in RGB. RequestError for what is none, or too large to be decoded safely."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise RequestError(f"There is no image file {str(file)!r}; images are read from local files only.")
    if (size := path.stat().st_size) > MAX_FILE:
        raise RequestError(f"The image {path} has {size:,} bytes, more than the {MAX_FILE:,} that are read.")
    return decode_image(path, f"The image {path}")


def decode_image(file: Path | BinaryIO, name: str, most: int = MAX_PIXELS) -> Image:
    """A picture, upright and in RGB. RequestError for what is none, or has more than ``most`` pixels."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise RequestError("Images need Pillow: install the extra eyas[vision].") from error
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height > most:  # known before anything is decoded
                left = "" if most == MAX_PIXELS else ", with those of the images before it"
                raise RequestError(f"{name} has {width} x {height} pixels, more than {MAX_PIXELS:,}{left}.")
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise RequestError(f"{name} is not an image that can be read ({', '.join(FORMATS)}).") from error
    except Image.DecompressionBombError as error:
        raise RequestError(f"{name} is too large to be decoded safely.") from error
    except RequestError:
        raise
    except BROKEN as error:
        raise RequestError(f"{name} is damaged: {error}") from error


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message holds an image. RequestError for any content but text and opened images.

    A path or address inside a message would be opened, or fetched, by transformers' processor: nobody asked for that.
    """
    found = False
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "image" and hasattr(part.get("image"), "convert"):
                found = True
            elif kind != "text":
                raise RequestError(
                    "A part of a message is {'type': 'text', 'text': ...} or {'type': 'image', 'image': an opened "
                    f"image (eyas.target.images.open_image)}}; found {str(part)[:80]}."
                )
    return found


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    processor: Any,
    why_no_processor: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], dict[str, Any] | None]:
    """Renders ``messages`` with the target's own chat template, ready for the assistant's turn.

    The template hears those of ``chat_template_kwargs`` that it reads: a processor would take the others for its own.
    Returns the prompt's token ids and, where the messages hold images, the processor's tensors for them.
    Raises RequestError when there is no chat template or it refuses the messages, or images without a processor.
    """
    images = has_images(messages)
    if images and processor is None:
        raise RequestError(
            "The messages hold an image, but this target has no image processor: "
            + (why_no_processor or "it is a text model, or was given none.")
        )
    if not images and not getattr(tokenizer, "chat_template", None):
        raise RequestError("This target's tokenizer has no chat template: give the prompt as text instead of messages.")
    how: dict[str, Any] = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    speaker, settings = processor if images else tokenizer, chat_template_kwargs or {}
    try:
        read = variables(template_of(speaker)) if settings else frozenset()
        heard = {name: value for name, value in settings.items() if name in read}
        encoded = speaker.apply_chat_template(list(messages), **heard, **how)
    except MISTAKES as error:
        raise RequestError(f"The target's chat template cannot take these messages: {error}") from error
    return encoded["input_ids"][0].tolist(), image_inputs(encoded) if images else None


def template_of(speaker: Any) -> str:
    """The template that a tokenizer or processor uses unless told otherwise; empty where there is none."""
    found = getattr(speaker, "chat_template", None)
    return (found.get("default") if isinstance(found, Mapping) else found) or ""


@lru_cache(maxsize=8)
def variables(template: str) -> frozenset[str]:
    """What a template reads and does not set itself. Raises jinja2's TemplateError where it is none."""
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
    return frozenset(find_undeclared_variables(parsed))


def image_inputs(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The tensors among a processor's (or ``generate``'s) inputs that belong to images; None for plain text."""
    tensors = {k: v for k, v in inputs.items() if k not in TEXT_KEYS and hasattr(v, "shape")}
    return tensors if any(k.startswith("pixel_values") for k in tensors) else None
