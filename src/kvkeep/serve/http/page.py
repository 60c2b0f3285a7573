"""The server's page: static files without secrets, which need no key."""

from __future__ import annotations

import re
from typing import final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from kvkeep.page import ASSETS, asset

_PAGE = "chat.html"
_PART = re.compile(r'(?:href|src)="assets/([\w.-]+)"')
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidate before each use
}


@final
class _Assets(StaticFiles):
    """Static files with headers that restrict a page to its own server and forbid embedding."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    """Routes of the page at `/` and of its files in `/assets/`."""
    assets = _Assets(directory=ASSETS)
    parts = frozenset(_PART.findall(asset(_PAGE)))

    async def page(request: Request) -> Response:
        return await assets.get_response(_PAGE, request.scope)

    async def part(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in parts:
            raise HTTPException(404)
        return await assets.get_response(name, request.scope)

    return [Route("/", page), Route("/assets/{name}", part)]
