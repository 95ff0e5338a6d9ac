"""The contract of a publisher, whole: a sender passes it where a subclass provides the fixture `world`."""

from __future__ import annotations

from tests.contract.publisher_content import ContentSuite
from tests.contract.publisher_faults import FaultSuite
from tests.contract.publisher_flow import FlowSuite
from tests.contract.publisher_input import InputSuite


class PublisherSuite(ContentSuite, InputSuite, FlowSuite):
    """On any log that can go away."""


__all__ = ["FaultSuite", "PublisherSuite"]
