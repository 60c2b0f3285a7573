"""RequestError: a refused request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvkeep.errors import KVKeepError


@dataclass(eq=False)
class RequestError(KVKeepError):
    """A refused request: the field and code at fault, and the HTTP status."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of(cls, field: str, why: str) -> Self:
        """The error for a field; its message is the field's name and `why`."""
        return cls(f"{field} {why}", field)

    @property
    def outcome(self) -> str:
        """The outcome by which a request with this error is counted."""
        if self.status in (429, 503):
            return "unavailable"
        return "refused" if self.status < 500 else "failed"

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same error in the names of the client's own request, from which a chat was made."""
        field, dot, rest = (self.param or "").partition(".")
        if field not in names:
            return self
        message = re.sub(rf"\b{field}\b", names[field], self.message)
        return replace(self, message=message, param=names[field] + dot + rest)

    def body(self) -> dict[str, Any]:
        """The error in the format of OpenAI's API."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        about = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}
