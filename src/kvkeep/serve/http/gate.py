"""Gate: which host names a server accepts, and which web pages may use it.

A browser lets any page send requests to any address that it can reach, including this machine. Two
headers, which a page cannot change, identify its requests: `Origin` names the page, and `Host` the
host name in the URL. In a DNS rebinding attack, the attacker's host name resolves to this server's
address. The server's own page has the URL's origin, so it is accepted only if the name in `Host` is
known to be the server's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from typing import final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvkeep.errors import SpecError
from kvkeep.serve.refused import RequestError
from kvkeep.serve.replies.reply import refusal

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+))(?::\d{1,5})?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?")
_USUAL_PORTS = {"http": "80", "https": "443"}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """The name in a `Host` header with or without a port, in lower case; empty if not valid."""
    found = _HOST.fullmatch(host.lower())
    return "" if found is None else (found[1] or found[2]).rstrip(".")


def host_names(given: Iterable[str]) -> list[str]:
    """Normalise host names for `Gate`: lower case, without a port.

    Raises:
        SpecError: a name is not valid.
    """
    names = []
    for host in given:
        name = host if host == "*" or _is_address(host) else _name_of(host)
        if not name:
            raise SpecError(f"host {host[:80]!a}; give a name such as gpu.example, or *")
        names.append(name)
    return names


def origin_names(given: Iterable[str]) -> list[str]:
    """Normalise origins as browsers send them: lower case, without a path or the scheme's default
    port.

    Raises:
        SpecError: an origin is not in the form that browsers send.
    """
    return [one if one in ("*", "null") else _origin_name(one) for one in given]


def _origin_name(given: str) -> str:
    found = _ORIGIN.fullmatch(given.lower().rstrip("/"))
    if found is None:
        wanted = "give a scheme and a host in ASCII, without a path, such as https://chat.example"
        raise SpecError(f"origin {given[:80]!a}; {wanted}")
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _USUAL_PORTS.get(scheme) else "")


@final
class Gate:
    """ASGI middleware that refuses requests for an unknown host name or from an unknown origin, and
    removes query strings, which may contain keys and would be logged.

    Args:
        hosts: accepted names from `host_names`, in addition to `localhost` and every numeric
            address; "*": all.
        origins: origins from `origin_names` whose pages may use the server, in addition to its own
            page under a known name; "*": all.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts, self._origins = {*hosts, "localhost"}, set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                scope["query_string"] = b""
                self._check(scope)
        except RequestError as error:
            await refusal(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = _name_of(host)
        known = name in self._hosts or _is_address(name)  # excludes names that only "*" accepts
        if not known and "*" not in self._hosts:
            message = (
                f"unknown host name {host[:80]!a}; use the address, or start with --allow-host"
            )
            raise RequestError(message, code="unknown_host", status=421)
        own = {f"{scope['scheme']}://{host}".lower()} if known else set()
        for origin in headers.getlist("origin"):
            if not {"*", origin.lower()} & (self._origins | own):
                page = f"pages of {origin[:80]!a} may not use this server"
                message = f"{page}; start it with --allow-origin to allow them"
                raise RequestError(message, code="unknown_origin", status=403)
