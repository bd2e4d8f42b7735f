"""Errors as OpenAI's API gives them, with all four of their keys."""

from __future__ import annotations

from typing import Any

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}
_RETRY = frozenset({408, 409, 429, 502, 503})  # a later try may succeed


class ApiError(Exception):
    """An answer that is no image: HTTP status, a stable code, one line for people, the field that it is about."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        retry: bool | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry_after, self.reason = retry_after, reason or code
        self.retry = status in _RETRY and code != "idempotency_mismatch" if retry is None else retry

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        found = {"x-should-retry": "true" if self.retry else "false"}
        if self.retry_after is not None:
            found["retry-after"] = str(self.retry_after)
        return found
