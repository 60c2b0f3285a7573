"""Gate: which names a server answers to, and which web pages may use it.

A browser lets any page send requests to any address that it reaches, this machine included. Two
headers tell such requests apart, for a page cannot change them: `Origin` names the page, and `Host`
the name that the address was looked up by, which is the attacker's when it was pointed at somebody
else's address (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from typing import final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvkeep.serve.replies import refusal
from kvkeep.serve.requests import RequestError

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::\d{1,5})?")


@final
class Gate:
    """Refuses what was not addressed to this server by a name of its own, or comes from a page.

    Args:
        hosts: names to answer to, beside `localhost` and every numeric address; "*": all.
        origins: pages that may use the server, such as "https://chat.example"; "*": all.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts} | {"localhost"}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await refusal(error)(scope, receive, send)

    def _refusal(self, headers: Headers) -> RequestError | None:
        host = headers.get("host", "")
        if not self._knows(host):
            return RequestError(
                f"this server does not answer to the host {host[:80]!a}; use its address, or start "
                "it with --allow-host",
                code="unknown_host",
                status=421,
            )
        for origin in headers.getlist("origin"):
            if not {"*", origin.lower()} & self._origins:
                return RequestError(
                    f"pages of {origin[:80]!a} may not use this server; start it with "
                    "--allow-origin to let them",
                    code="unknown_origin",
                    status=403,
                )
        return None

    def _knows(self, host: str) -> bool:
        if "*" in self._hosts:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = (found[1] or found[2]).lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return found[2] is not None and name.rstrip(".") in self._hosts
        return True
