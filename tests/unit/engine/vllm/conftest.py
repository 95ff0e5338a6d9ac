"""Fixtures of the tests of the vLLM adapter."""

from __future__ import annotations

from tests.support.vllm import new

__all__ = ["new"]
