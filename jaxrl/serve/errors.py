"""What a client is told when its request is not answered, in the form that OpenAI's clients read."""

from typing import Any

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Refused(Exception):
    """A request ends with an HTTP status; `param` is the field of the request that is to blame."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": KINDS.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }
