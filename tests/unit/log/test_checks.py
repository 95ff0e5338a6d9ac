"""What is refused before it is sent."""

from __future__ import annotations

import pytest

from moebus.broker.checks import check_record
from moebus.broker.errors import RecordTooLarge
from moebus.broker.ports import MAX_RECORD_BYTES, OutRecord


def test_size_counts_key_value_and_headers() -> None:
    record = OutRecord("t", b"12345", b"123", [("é", b"12"), ("b", None)])
    assert check_record(record) == 5 + 3 + (2 + 2) + 1
    assert check_record(OutRecord("t", None)) == 0


def test_limit() -> None:
    assert check_record(OutRecord("t", b"x" * MAX_RECORD_BYTES)) == MAX_RECORD_BYTES
    with pytest.raises(RecordTooLarge, match=f"record for t: {MAX_RECORD_BYTES + 1} bytes"):
        check_record(OutRecord("t", b"x" * MAX_RECORD_BYTES, b"k"))


def test_compacted_topics_need_a_key() -> None:
    with pytest.raises(ValueError, match=r"moebus\.dlt\.v1: a compacted topic needs a key"):
        check_record(OutRecord("moebus.dlt.v1", b"v"))
    assert check_record(OutRecord("moebus.dlt.v1", None, b"")) == 0


def test_header_names_that_utf8_cannot_hold() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        check_record(OutRecord("t", b"v", b"k", [("\ud800", b"")]))
