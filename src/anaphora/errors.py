"""All errors that users can see. Each class has the HTTP status and the exit code that it leads to."""

from __future__ import annotations


class AnaphoraError(Exception):
    """Base class. The message says what is wrong, with which value, and what to do; ``param`` names the field."""

    status = 500
    exit_code = 1
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(AnaphoraError):
    """The request is invalid or can never be served."""

    status = 400
    exit_code = 2
    code = "invalid_request_error"


class Unauthorized(AnaphoraError):
    """The API key is missing or wrong."""

    status = 401
    exit_code = 2
    code = "invalid_api_key"


class NotFound(AnaphoraError):
    """The model, route, or pinned prefix does not exist."""

    status = 404
    exit_code = 2
    code = "not_found"


class RequestTimeout(AnaphoraError):
    """The client took too long to send its request."""

    status = 408
    exit_code = 2
    code = "request_timeout"


class Conflict(AnaphoraError):
    """The server's current state does not allow it (a reset while requests are running)."""

    status = 409
    exit_code = 1
    code = "conflict"


class BodyTooLarge(AnaphoraError):
    """The request body is over the size limit."""

    status = 413
    exit_code = 2
    code = "request_too_large"


class EngineDead(AnaphoraError):
    """The engine process has ended or hangs; the message says why."""

    status = 503
    exit_code = 1
    code = "engine_dead"


class StepFailed(AnaphoraError):
    """A step of the engine failed, and this request with it. Other requests are not affected."""

    status = 500
    exit_code = 1
    code = "step_failed"


class ConfigError(AnaphoraError):
    """A setting or flag, or a combination of them, is invalid."""

    status = 400
    exit_code = 2
    code = "config_error"


class ModelError(ConfigError):
    """The model is missing, broken, or not supported; the message gives its name and the reason."""

    code = "model_error"


class CacheInvariantError(AnaphoraError):
    """An invariant of the cache is violated: a fault of this program, never of a request. The server should restart."""

    status = 503
    code = "cache_invariant"
