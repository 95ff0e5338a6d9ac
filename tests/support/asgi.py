"""Asking an application without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI


def ask(app: FastAPI, method: str, path: str, **given: Any) -> httpx.Response:
    """One request; faults of the application are answers, as over the network."""

    async def once() -> httpx.Response:
        async with browser(app) as http:
            return await http.request(method, path, **given)

    return asyncio.run(once())


def browser(app: FastAPI) -> httpx.AsyncClient:
    """A client of the application in the running loop."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")
