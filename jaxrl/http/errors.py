"""HTTP errors in the formats that OpenAI's and Anthropic's clients parse."""

from typing import Any

ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES = ERROR_TYPES | {
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


MAX_MESSAGE = 1000  # characters: a message may contain values of the request


class RequestError(Exception):
    """A request that ends with an HTTP error status; `param` names the offending request field."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + " ..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }


def anthropic_body(error: RequestError) -> dict[str, Any]:
    """The body of an error of the Messages API."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": error.message}}
