"""The contract of the log, whole. Subclass `BrokerSuite` (fixture `world`) and `OutageSuite` for an adapter."""

from __future__ import annotations

from tests.contract.admin_suite import AdminSuite
from tests.contract.group_suite import GroupSuite
from tests.contract.outage_suite import OutageSuite
from tests.contract.read_suite import ReadSuite
from tests.contract.write_suite import WriteSuite


class BrokerSuite(WriteSuite, ReadSuite, AdminSuite, GroupSuite):
    """Everything that needs no outage."""


__all__ = ["BrokerSuite", "OutageSuite"]
