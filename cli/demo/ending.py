"""The demo's end: delete by prefix, and a summary from the Prometheus metrics of every process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from moebus.cli._output import out
from moebus.cli.demo.rollouts import PROMPTS
from moebus.consumers.reader import RoutingReader
from moebus.producers.routing import RoutingPublisher
from moebus.schemas.errors import FatalError

Samples = dict[str, float]


class WrongDelete(FatalError):
    """A delete by prefix removed too much or too little; the text says what is there."""


def delete_all(
    publisher: RoutingPublisher, reader: RoutingReader, wait: Callable[[Callable[[], bool], str], None]
) -> None:
    """Deletes `a:1`, shows that `a:10` is still there, then ends every other request.

    Raises:
        WrongDelete: the store does not hold exactly what it should.
    """
    publisher.delete("a:1").result(30)
    wait(lambda: not held(reader, "a:1"), "the store to have applied the delete of a:1")
    kept = held(reader, "a:10")
    out.print(f"  deleted prefix a:1   -> a:1 holds {held(reader, 'a:1')} rollouts, a:10 still {kept}")
    if not kept:
        raise WrongDelete("deleting a:1 has removed a:10 too")
    for prompt in PROMPTS:
        publisher.delete(prompt).result(30)
    wait(lambda: not held(reader), "the store to be empty")
    out.print(f"  deleted prefixes {', '.join(PROMPTS)} -> the store holds {held(reader)} rollouts of this run")


def held(reader: RoutingReader, prefix: str | None = None) -> int:
    """How many rollouts of the run the stores hold under a prefix (None: all)."""
    return len(reader.page(prefix).rollouts)


def scrape(urls: Mapping[str, str], own: bytes) -> Samples:
    """All samples of all processes added up, by name and by `name{label=value}`; `own`: this process's page."""
    total: Samples = defaultdict(float)
    pages = [httpx.get(f"{url}/metrics", timeout=10).text for url in urls.values()]
    for page in (*pages, own.decode()):
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                total[sample.name] += sample.value
                for label, value in sample.labels.items():
                    total[f"{sample.name}{{{label}={value}}}"] += sample.value
    return total


def summary(samples: Samples) -> None:
    """Prints the table; every figure comes from /metrics."""
    table = Table(title="Summary, from the Prometheus metrics of every process", title_justify="left")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for what, figure in rows(samples):
        table.add_row(what, figure)
    out.print(table)


def rows(samples: Samples) -> Iterable[tuple[str, str]]:
    """The lines of the summary."""

    def count(name: str) -> str:
        return f"{samples.get(name, 0):,.0f}"

    def mean_ms(name: str) -> str:
        n = samples.get(f"{name}_count", 0)
        return f"{1000 * samples.get(f'{name}_sum', 0) / n:.1f} ms" if n else "-"

    yield "rollouts published and acknowledged", count("moebus_routes_rollouts_total{outcome=stored}")
    yield "route records / bytes", f"{count('moebus_routes_records_total')} / {count('moebus_routes_bytes_total')}"
    yield "publish: submit to acknowledged, mean", mean_ms("moebus_routes_publish_duration_seconds")
    yield "store: appended to readable, mean", mean_ms("moebus_store_readable_delay_seconds")
    yield "store: commit with fsync, mean", mean_ms("moebus_store_commit_duration_seconds")
    yield "reader: resolve of a batch, mean", mean_ms("moebus_reader_resolve_duration_seconds")
    yield "rollouts deleted", count("moebus_store_deleted_rollouts_total")
    yield "control operations", count("moebus_control_operations_total")
    yield "control answers of workers", count("moebus_control_answers_total")
    yield "control operation, mean", mean_ms("moebus_control_operation_duration_seconds")
    yield (
        "tokens: computed prompt / cached / output",
        " / ".join(count(f"moebus_engine_tokens_total{{kind={kind}}}") for kind in ("prompt", "cached", "output")),
    )
    yield "dead letters", count("moebus_dead_letters_total")
