"""The story of the demo, step by step."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moebus.cli._output import err, out
from moebus.cli.control import print_trace
from moebus.cli.demo import ending
from moebus.cli.demo.fleet_steps import FLEET, run_steps
from moebus.cli.demo.model import CONFIG, FIRST_VERSION, NEW_VERSION, SEED, Weights, make_weights
from moebus.cli.demo.rollouts import PROMPTS, SAMPLES, TURNS, Round
from moebus.cli.demo.stage import Stage
from moebus.cli.demo.trainer import ROUTER_NOISE, Report, Trainer
from moebus.consumers.reader import RoutingReader
from moebus.engine.paddle import load_paddle
from moebus.observability.metrics import Metrics
from moebus.producers.control import ControlClient
from moebus.producers.routing import RoutingPublisher
from moebus.schemas.errors import FatalError

TOTAL = len(PROMPTS) * len(SAMPLES) * TURNS


class DemoFailed(FatalError):
    """What the demo promises did not hold; the text says what."""


class Story:
    """Tells it once; every step prints what it did."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._metrics = Metrics()

    def tell(self) -> None:
        """All steps; raises as soon as one does not hold."""
        load_paddle()  # here, on the main thread: elsewhere it could not give the signal handlers back
        weights, source = self._open()
        stage = self._stage
        with (
            ControlClient(stage.broker, stage.topics, issuer="demo", metrics=self._metrics) as control,
            RoutingReader(stage.broker, stage.topics, run=stage.run, metrics=self._metrics) as reader,
        ):
            with err.status("waiting until every process is ready"):
                stage.wait_ready(control, 90)
            for name, url in stage.urls.items():
                out.print(f"  {name:<16} {url}/metrics")
            control.begin_run(stage.run, target=FLEET)
            control.resume(target=FLEET)
            ids = self._round(control, reader, weights, source)
            _head(5, "One request across topics and processes: moebus control show")
            print_trace(control.trace(ids[-2]))
            self._end(reader)
        _head(7, "What the processes counted")
        ending.summary(ending.scrape(stage.urls, self._metrics.text()))

    def _open(self) -> tuple[dict[str, Weights], Path]:
        stage = self._stage
        _head(1, "A real Apache Kafka, two control workers beside Paddle engines, a route store")
        with err.status("starting Kafka") as status:
            address = stage.start_kafka(lambda text: status.update(text))
            out.print(f"  Kafka serves at {address}, topics {stage.topics.prefix}.*")
            status.update("making weights, starting workers and store")
            folder = stage.directory / "weights"
            folder.mkdir()
            made = make_weights(folder)
            stage.start_processes(folder, seed=SEED, version=FIRST_VERSION)
        return made

    def _round(
        self, control: ControlClient, reader: RoutingReader, weights: dict[str, Weights], source: Path
    ) -> list[str]:
        shape = f"{len(PROMPTS)} prompts x {len(SAMPLES)} samples x {TURNS} turns"
        _head(2, f"A round of {shape}; a trainer replays what comes")
        workers = {name: url for name, url in self._stage.urls.items() if name.startswith("worker")}
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err) as progress:
            generated = progress.add_task("rollouts generated", total=TOTAL)
            trained = progress.add_task("rollouts trained on", total=TOTAL)
            round_ = Round(workers, CONFIG.vocab_size, seed=SEED, on_done=lambda: progress.advance(generated))
            trainer = Trainer(reader, CONFIG, weights, round_.finished, lambda: progress.advance(trained))
            round_.start()
            trainer.start()
            try:
                self._stage.wait(lambda: progress.tasks[0].completed >= 4, "the first rollouts", 60)
                _head(3, "Meanwhile the controller pauses, puts to sleep, wakes, updates and resumes the fleet")
                ids = run_steps(control, NEW_VERSION, source)
                self._stage.wait(lambda: trainer.join(0.05) or trainer.failure is not None, "the trainer", 120)
            finally:
                round_.stop()
        for failure in (round_.failure, trainer.failure):
            if failure is not None:
                raise failure
        _report(trainer.report)
        return ids

    def _end(self, reader: RoutingReader) -> None:
        _head(6, "The requests end: deletes by prefix")
        stage = self._stage
        publisher = RoutingPublisher(
            stage.broker, stage.topics, run=stage.run, card=CONFIG.card(), metrics=self._metrics
        )
        try:
            ending.delete_all(publisher, reader, stage.wait)
        finally:
            publisher.close(10)


def _head(number: int, text: str) -> None:
    out.print(f"\n[bold cyan]{number}[/bold cyan] [bold]{text}[/bold]")


def _report(report: Report) -> None:
    """What the trainer saw; raises DemoFailed where it is not what moebus promises."""
    _head(4, "The trainer: routes from the log against a full recompute, and their replay")
    with_replay, without = report.mean(report.with_replay), report.mean(report.without_replay)
    versions = ", ".join(f"{count} under {version}" for version, count in sorted(report.versions.items()))
    out.print(f"  {report.rollouts} rollouts ({versions}), {report.rows:,} rows of routes")
    out.print(f"  prompt tokens served by the prefix cache: {report.cached_tokens:,}")
    out.print(f"  rows that differ from a recompute without cache: {report.mismatched_rows}")
    out.print(f"  mean |delta log p| of the trainer (router noise {ROUTER_NOISE}):")
    out.print(f"    own top-k          {without:.2e}")
    out.print(f"    routes replayed    {with_replay:.2e}   ({without / max(with_replay, 1e-12):.1f} times lower)")
    if report.rollouts != TOTAL or report.mismatched_rows or not report.cached_tokens or with_replay >= without:
        raise DemoFailed("the routes are not what the engines computed, or replay did not help: see the figures above")
