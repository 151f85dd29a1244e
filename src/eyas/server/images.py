"""Images that come with a message: data URLs only, and never more pixels than are safe to decode."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from eyas.core import RequestError
from eyas.server.errors import refused
from eyas.target.images import MAX_PIXELS, decode_image

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES = 16


class ImageReader:
    """Reads the images of one request, which share one allowance. Raises ApiError for what is none or too much."""

    def __init__(self) -> None:
        self._images, self._pixels = 0, 0

    def read(self, url: str, where: str) -> Image:
        """An image in RGB. ``where`` is the place in the request, for whoever has to find it."""
        self._images += 1
        if self._images > MAX_IMAGES:
            raise refused(where, f"A request may have {MAX_IMAGES} images, and this one has more.")
        content = io.BytesIO(content_of(url, where))
        try:
            image = decode_image(content, where, MAX_PIXELS - self._pixels)
        except RequestError as error:
            raise refused(where, str(error)) from error
        self._pixels += image.width * image.height
        return image


def content_of(url: str, where: str) -> bytes:
    head, comma, data = url.partition(",")
    if not head.startswith("data:"):
        raise refused(where, f"{where} must be a data URL (data:image/png;base64,...): nothing is fetched from afar.")
    if not comma or not head.endswith(";base64"):
        raise refused(where, f"{where} must be a data URL in base64: data:image/png;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise refused(where, f"{where} is not valid base64.") from error
