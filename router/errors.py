"""What can go wrong in the router.

Covers errors of the service itself and errors that a client is told, in OpenAI's shape. Does not
cover how they become HTTP answers (`pie.router.app`).

    RouterError
    ├── PortBusyError          the address to listen on is taken
    ├── AddressUnusableError   the address to listen on is not this machine's, or not allowed
    ├── CertificateError       the files for TLS cannot be used
    ├── KeyFileError           the file of API keys cannot be read or written
    ├── TokenizerMismatchError a worker's tokenizer files differ from those found here
    └── ApiError               an answer to a client: status, message, type, param, code
"""

from __future__ import annotations

import math
from collections.abc import Mapping


class RouterError(Exception):
    """Anything that the router raises on purpose."""


class PortBusyError(RouterError):
    """The address to listen on is taken."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.host = host
        self.port = port

    def __str__(self) -> str:
        return f"port {self.port} on {self.host} is in use; set router.port to another one"


class AddressUnusableError(RouterError):
    """The address to listen on is not this machine's, or not allowed."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(host, port, reason)
        self.host = host
        self.port = port
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot listen on {self.host} port {self.port}: {self.reason}; see router.host"


class CertificateError(RouterError):
    """The files for TLS cannot be used."""


class KeyFileError(RouterError):
    """The file of API keys cannot be read or written."""


class TokenizerMismatchError(RouterError):
    """A worker's tokenizer files differ from those found under the same path here."""


class ApiError(RouterError):
    """An answer to a client that says what is wrong, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(status, message, kind, param, code, headers, logged)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.logged = message if logged is None else logged
        """What a log says in place of a message that may repeat what was asked or answered."""

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body that OpenAI's clients read."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


_MOST_SHOWN = 64


def shown(value: str) -> str:
    """Return what a client said as an answer or a line in a log repeats it: not at any length."""
    return value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}…"


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """Return the 400 that names a field."""
    return ApiError(400, message, "invalid_request_error", param, code)


def model_not_found(name: str) -> ApiError:
    """Return the 404 for a model that nobody serves."""
    return ApiError(
        404,
        f"The model `{shown(name)}` does not exist here; `/v1/models` lists those that do.",
        "invalid_request_error",
        "model",
        "model_not_found",
    )


def too_large(message: str, param: str | None = None) -> ApiError:
    """Return the 413 that names the limit."""
    return ApiError(413, message, "invalid_request_error", param, "request_too_large")


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """Return the 429 that says when to come again."""
    return ApiError(
        429, message, "rate_limit_error", None, "overloaded", _retry_after(retry_after_s)
    )


def over_quota(message: str, wait_s: float) -> ApiError:
    """Return the 429 for a tenant that has used up what it may take."""
    return ApiError(
        429,
        message,
        "rate_limit_error",
        None,
        "rate_limit_exceeded",
        {"retry-after": str(max(1, math.ceil(wait_s)))},
    )


def unavailable(message: str, retry_after_s: float, code: str = "unavailable") -> ApiError:
    """Return the 503 that says when to come again."""
    return ApiError(503, message, "server_error", None, code, _retry_after(retry_after_s))


def server_error(
    message: str,
    code: str = "internal_error",
    status: int = 500,
    *,
    logged: str | None = None,
) -> ApiError:
    """Return an answer for what is not the client's fault."""
    return ApiError(status, message, "server_error", None, code, None, logged)


def _retry_after(seconds: float) -> dict[str, str]:
    """Return the header in whole seconds, at least one."""
    return {"retry-after": str(max(1, round(seconds)))}
