import pytest

pytest.register_assert_rewrite(
    *(f"tests.contract.engine_{part}" for part in ("rig", "generation", "lifecycle", "memory", "weights", "traffic"))
)
