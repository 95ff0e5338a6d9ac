"""What an adapter declares, in the words of the table on its page in docs/engines."""

from __future__ import annotations

from moebus.engine.port import Capabilities
from moebus.schemas.tags import Tag


def declared(can: Capabilities) -> dict[str, str]:
    """Rows of the table: name -> value. What is not usual is there only where it is so."""

    def words(values: object) -> str:
        return ", ".join(sorted(map(str, values)))  # type: ignore[call-overload]

    found = {
        "pause modes": words(can.pause_modes),
        "levels of weight": words(can.levels[Tag.WEIGHT]),
        "levels of kv_cache": words(can.levels[Tag.KV_CACHE]),
        "tags": words(can.tags),
        "stage": can.stage,
        "cache modes": words(can.cache_modes),
        "transfer": "yes" if can.transfer else "no",
        "abort": "yes" if can.abort else "no",
    }
    for name, is_so in (("sleeps whole", can.sleeps_whole), ("wakes whole", can.wakes_whole)):
        if is_so:
            found[name] = "yes"
    return found
