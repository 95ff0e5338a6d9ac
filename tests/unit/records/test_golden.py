from __future__ import annotations

import json

import pytest

from moebus.schemas.record import decode, encode
from tests.golden.make_record_v1 import FOLDER, describe

EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def test_every_file_has_its_values() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.bin")) == sorted(EXPECTED)
    assert len(EXPECTED) >= 9


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_records_of_version_1_are_read_for_ever(name: str) -> None:
    data = (FOLDER / f"{name}.bin").read_bytes()
    record = decode(data)
    assert describe(record) == EXPECTED[name]
    assert encode(record) == data
