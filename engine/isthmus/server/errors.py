"""Everything that can go wrong with a request, as a status and OpenAI's error object."""

from __future__ import annotations

import http
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from isthmus.errors import (
    EngineDeadError,
    InvalidParamsError,
    InvalidPromptError,
    NeverFitsError,
    QueueFullError,
    RequestError,
)
from isthmus.server.departure import ClientGone

CLIENT_GONE = 499
"""Nobody sees this status but the log. nginx made it known."""
logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""When to ask again while the engine is starting, or stopping behind a load balancer."""
_FIELD = re.compile(r"(?:SamplingParams|BeamSearchParams|PoolingParams|StructuredOutput)\.(\w+)")
_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(HTTPException):
    """An answer that is an error. kind: OpenAI's `type`, None = the usual one of the status.  param: the field of the
    request that is wrong.  code: for programs.
    """

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, headers)
        # What it quotes of a request may not be text that can be sent.
        self.message = message.encode(errors="replace").decode()
        self.kind = kind or _KINDS.get(status_code, "server_error")
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unsupported(param: str, why: str) -> ApiError:
    """A field, or a value of it, that asks for what this server does not do."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def api_error(error: BaseException) -> ApiError:
    """The answer to an exception. One that nobody foresaw is logged, and its text stays here."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            headers = {"retry-after": str(max(math.ceil(error.retry_after_s), 1))}
            return ApiError(429, _text(error), code="queue_full", headers=headers)
        case NeverFitsError():
            return ApiError(400, _text(error), code="never_fits")
        case InvalidParamsError():
            found = _FIELD.match(str(error))
            message = _FIELD.sub(r"\1", _text(error), count=1)
            return ApiError(400, message, param=found and found[1], code="invalid_value")
        case InvalidPromptError():
            return ApiError(400, _text(error), param="prompt", code="invalid_prompt")
        case RequestError():
            return ApiError(400, _text(error))
        case EngineDeadError():
            return ApiError(503, _text(error), code="engine_unavailable", headers={"retry-after": str(RETRY_AFTER_S)})
        case TimeoutError():
            return ApiError(
                504, "the request took longer than this server allows; ask for fewer tokens", code="timeout"
            )
        case ClientGone():
            return ApiError(CLIENT_GONE, "the client has gone")
        case RequestValidationError():
            return _malformed(error.errors())
        case HTTPException():
            return ApiError(error.status_code, _plain(error), headers=error.headers)
    logger.error("a request failed for a reason that nobody foresaw", exc_info=error)
    return ApiError(500, "the server failed; its log says why, under the x-request-id of this answer", code="internal")


def error_response(error: BaseException) -> Response:
    """The whole answer to an exception."""
    answer = api_error(error)
    return JSONResponse(answer.body(), answer.status_code, answer.headers)


def _text(error: Exception) -> str:
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def _plain(error: HTTPException) -> str:
    """Starlette says "Not Found" and the like."""
    if error.status_code == http.HTTPStatus.NOT_FOUND:
        return "there is nothing at this path; /openapi.json lists what there is"
    if error.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED:
        return "this path does not take this method; /openapi.json lists what there is"
    return str(error.detail)


_MAX_REASONS = 3


def _malformed(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """A body that is no JSON, or not of the right form."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(
            400,
            f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}",
            code="invalid_json",
        )
    reasons = list(dict.fromkeys(_reason(problem) for problem in problems))[:_MAX_REASONS]
    fields = [part for part in first["loc"] if part not in ("body", "query", "path")]
    if not fields:
        message = "the body must be a JSON object, sent with the header 'content-type: application/json'"
        return ApiError(400, message, code="invalid_json")
    return ApiError(400, "; ".join(reasons), param=str(fields[0]), code="invalid_value")


def _reason(problem: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in problem["loc"][1:])
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{path}: {message}"
