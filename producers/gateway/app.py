"""The gateway's FastAPI application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import SecretStr
from starlette.exceptions import HTTPException

from moebus.broker.errors import AppendFailed, RecordTooLarge
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics, moebus_version
from moebus.producers.control import UnknownOperation
from moebus.producers.gateway import fastdeploy, fleet, routes
from moebus.producers.gateway.auth import Unauthorized, bearer
from moebus.producers.gateway.backend import Backend
from moebus.producers.gateway.bodies import Body, error_body
from moebus.producers.gateway.legacy import Legacy, legacy_router
from moebus.producers.gateway.measured import Measured
from moebus.producers.gateway.routes import RouteBackend
from moebus.producers.gateway.strict import JsonBodies, first_problem
from moebus.schemas.errors import InvalidInput, MoebusError, RetriableError
from moebus.schemas.route_errors import RouteError

_STATUS: Mapping[type[MoebusError], int] = {
    RecordTooLarge: 413,
    AppendFailed: 500,
    UnknownOperation: 404,
    fleet.UnknownWorker: 404,
    InvalidInput: 400,
    RetriableError: 503,
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Body, "description": "A parameter or field is unknown or wrong; it is named"},
    401: {"model": Body, "description": "No bearer token"},
    403: {"model": Body, "description": "Another bearer token"},
    503: {"model": Body, "description": "No broker, or too many calls under way"},
    "default": {"model": Body, "description": "The number of what the workers answered, see docs/gateway.md"},
}
_log = get_logger(__name__)


def gateway_app(
    backend: Backend,
    *,
    token: SecretStr | None = None,
    legacy: Legacy | None = None,
    route_backend: RouteBackend | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The application; mount it behind the pages that every process has.

    `token`: what callers must present as bearer token (None: nobody is asked). `legacy`: how the two legacy paths work
    (default: over the log). `route_backend`: None leaves the paths of routes out.
    """
    app = FastAPI(
        title="moebus gateway",
        version=moebus_version(),
        description="Commands for a fleet of inference engines, over one ordered log.",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        dependencies=[] if token is None else [Depends(bearer(token))],
        responses=_ERRORS,
    )
    app.include_router(fastdeploy.router(backend))
    app.include_router(legacy_router(backend, legacy or Legacy(over_log=True)))
    app.include_router(fleet.router(backend))
    if route_backend is not None:
        app.include_router(routes.router(backend, route_backend))
    app.add_middleware(Measured, metrics=metrics or Metrics())
    app.add_middleware(JsonBodies)
    app.add_exception_handler(MoebusError, _moebus_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _server_error)
    return app


def _status_of(error: Exception) -> int:
    if isinstance(error, RouteError):
        return error.http
    if isinstance(error, Unauthorized):
        return error.status
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


async def _moebus_error(request: Request, error: Exception) -> JSONResponse:
    status = _status_of(error)
    name = error.name if isinstance(error, RouteError) else type(error).__name__
    if status >= 500:
        _log.warning("gateway.failed", str(error), path=request.url.path, error=name)
    body = error_body(name, str(error), getattr(request.state, "request_id", None))
    return JSONResponse(body, status, headers={"www-authenticate": "Bearer"} if status == 401 else None)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _moebus_error(request, first_problem(error.errors()))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # the framework's word for a body that its JSON reader gives up on
        return await _moebus_error(request, InvalidInput("body", "JSON that cannot be read, nested too deeply perhaps"))
    return JSONResponse(error_body("Http", str(error.detail)), error.status_code, headers=error.headers)


async def _server_error(request: Request, error: Exception) -> JSONResponse:
    _log.error("gateway.error", str(error), exc=error, path=request.url.path)
    return JSONResponse(error_body(type(error).__name__, str(error)), 500)
