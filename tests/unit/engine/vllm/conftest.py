"""Fixtures of the tests of the vLLM adapter."""

from __future__ import annotations

from tests.unit.engine.vllm.rig import new

__all__ = ["new"]
