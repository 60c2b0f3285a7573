"""Images of a request: read from data URLs, or fetched from hosts that the operator allows."""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Collection, Sequence
from http.client import HTTPException
from typing import Any, final
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

from torch import Tensor

from kvkeep.errors import reason_of
from kvkeep.extras import needed_by
from kvkeep.serve.refused import RequestError

_DATA = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)
_MOST_PIXELS = 2**25  # of all images of a request: a small file may have many pixels
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_SEND = "send the image itself, as data:image/png;base64,..."
_PIECE = 2**16  # bytes per read


@final
class Images:
    """Tokenises texts with images.

    Args:
        processor: the model's processor from transformers.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def read(
        self, text: str, urls: Sequence[str], *, special: bool
    ) -> tuple[list[int], dict[str, Tensor]]:
        """Tokenise a text with images; return the token ids and the model's further inputs.

        Args:
            text: the text, with a placeholder for each image.
            urls: the images' data URLs.
            special: whether the tokenizer adds special tokens around the text.

        Raises:
            RequestError: an image is not valid or too large, or the processor refuses it.
        """
        images, left = [], _MOST_PIXELS
        for url in urls:
            images.append(_opened(url, left))
            left -= images[-1].width * images[-1].height
        try:
            made = self._processor(
                text=[text], images=[images], return_tensors="pt", add_special_tokens=special
            )
        except Exception as error:  # processors raise errors of all classes
            why = f"the model's processor cannot read these images: {reason_of(error)}"
            raise _refused(why) from error
        ids: list[int] = made.pop("input_ids")[0].tolist()
        if ids[-1:] == [getattr(self._processor, "image_token_id", None)]:
            raise _refused("the prompt ends with an image; let text follow it")
        made.pop("attention_mask", None)
        return ids, {name: x for name, x in made.items() if isinstance(x, Tensor)}


def fetched(url: str, hosts: Collection[str], most_bytes: int, timeout_s: float) -> str:
    """Fetch an image as a data URL.

    Args:
        hosts: hosts from which images may be fetched; "*": all.

    Raises:
        RequestError: the host is not allowed, or the image cannot be fetched.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https"):
        raise _refused(f"the image {url[:80]!a} has an unsupported URL; {_SEND}")
    if not {"*", host} & set(hosts):
        where = f"this server fetches no images from {host[:80]!a}"
        raise _refused(f"{where}; {_SEND}, or start it with --allow-images-from and the host")
    deadline, found = time.monotonic() + timeout_s, bytearray()
    try:
        with build_opener(_NoRedirect).open(url, timeout=timeout_s) as answer:
            while piece := answer.read1(_PIECE):
                found += piece
                if len(found) > most_bytes:
                    raise _refused(f"the images exceed {most_bytes} bytes; send smaller ones")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it takes more than {timeout_s:g} s")
    except (OSError, ValueError, HTTPException) as error:
        raise _refused(f"the image {url[:80]!a} cannot be fetched: {error}") from error
    return f"data:image/any;base64,{base64.b64encode(found).decode()}"


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects, which may lead to a host that is not allowed."""

    def redirect_request(self, *given: Any, **named: Any) -> None:
        return None


def _opened(url: str, most_pixels: int) -> Any:
    """Decode the image of a data URL to RGB."""
    with needed_by("images in requests", "images"):
        from PIL import Image  # noqa: PLC0415 (of an extra)

    head = _DATA.match(url)
    try:
        data = base64.b64decode(url[head.end() :] if head else "", validate=True)
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > most_pixels:
            size = f"{image.width} x {image.height} pixels"
            raise _refused(f"{size} exceed the limit of {_MOST_PIXELS}; send smaller images")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        formats = ", ".join(_FORMATS)
        raise _refused(f"the image {url[:40]!a} is not valid ({formats}); {_SEND}") from error


def _refused(message: str) -> RequestError:
    return RequestError(message, "messages", "invalid_image")
