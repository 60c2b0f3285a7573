"""Gate: which host names a server accepts, and which web pages may use it.

A browser lets any page send requests to any address that it can reach, including this machine. Two
headers, which a page cannot change, identify such requests: `Origin` names the page, and `Host` the
host name in the URL. In a DNS rebinding attack that name belongs to the attacker, who made it
resolve to this server's address. The origin of the server's own page is that of the URL, so that
page is let in only where the name in `Host` is known to be the server's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from typing import final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvkeep.errors import SpecError
from kvkeep.serve.replies import refusal
from kvkeep.serve.requests import RequestError

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::\d{1,5})?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?")
_USUAL_PORTS = {"http": "80", "https": "443"}


def host_names(given: Iterable[str]) -> list[str]:
    """Names of hosts as `Gate` compares them: without a port, in lower case.

    Raises:
        SpecError: a name is not valid.
    """
    return [host if host == "*" else _host_name(host) for host in given]


def _host_name(given: str) -> str:
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        found = _HOST.fullmatch(given)
    name = "" if found is None else (found[1] or found[2]).lower().rstrip(".")
    if not name:
        raise SpecError(f"host {given[:80]!a}; give a name such as gpu.example, or *")
    return name


def origin_names(given: Iterable[str]) -> list[str]:
    """Origins as browsers send them: in lower case, without a path or the scheme's usual port.

    Raises:
        SpecError: an origin is not one that a browser would send.
    """
    return [one if one in ("*", "null") else _origin_name(one) for one in given]


def _origin_name(given: str) -> str:
    found = _ORIGIN.fullmatch(given.lower().rstrip("/"))
    if found is None:
        raise SpecError(
            f"origin {given[:80]!a}; give a scheme and a host, such as https://chat.example, in "
            "ASCII and without a path"
        )
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _USUAL_PORTS.get(scheme) else "")


@final
class Gate:
    """ASGI middleware that refuses requests for an unknown host name or from an unknown origin.

    Args:
        hosts: from `host_names`: accepted names, in addition to `localhost` and every numeric
            address; "*": all.
        origins: from `origin_names`: origins of pages that may use the server, in addition to its
            own page under a known name; "*": all.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts, self._origins = {*hosts, "localhost"}, set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await refusal(error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        known = self._knows(host)
        if not known and "*" not in self._hosts:
            return RequestError(
                f"this server does not accept the host name {host[:80]!a}; use its address, or "
                "start it with --allow-host",
                code="unknown_host",
                status=421,
            )
        own = {f"{scope['scheme']}://{host}".lower()} if known else set()
        for origin in headers.getlist("origin"):
            if not {"*", origin.lower()} & (self._origins | own):
                return RequestError(
                    f"pages of {origin[:80]!a} may not use this server; start it with "
                    "--allow-origin to allow them",
                    code="unknown_origin",
                    status=403,
                )
        return None

    def _knows(self, host: str) -> bool:
        """Whether this is a name of the server, or an address; names that "*" lets in are not."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = (found[1] or found[2]).lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return found[2] is not None and name.rstrip(".") in self._hosts
        return True
