"""The contract of the log, whole: an adapter subclasses the three suites and provides the fixture `world`."""

from __future__ import annotations

from tests.contract.admin_suite import AdminSuite
from tests.contract.group_suite import GroupSuite
from tests.contract.outage_suite import OutageSuite, RestartSuite
from tests.contract.read_suite import ReadSuite
from tests.contract.write_suite import WriteSuite


class BrokerSuite(WriteSuite, ReadSuite, AdminSuite, GroupSuite):
    """Everything that needs no outage."""


__all__ = ["BrokerSuite", "OutageSuite", "RestartSuite"]
