"""kill -9 of a worker, of the process that sends its routes, of the store and of the broker in the middle of a round
(issue: nothing acknowledged is lost); SIGTERM of a worker whose routes are on their way.

Real processes, a Kafka of the test's own, simulated engines (their routes can be computed again exactly).
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from moebus.broker import open_broker
from moebus.broker.errors import BrokerUnavailable
from moebus.broker.local import LocalCluster
from moebus.broker.ports import Broker, TopicPartition
from moebus.broker.topics import Topics
from moebus.consumers.reader import RoutingReader
from moebus.producers.control import ControlClient
from moebus.schemas.route_ref import RouteRef
from tests.support.processes import Launcher, launcher
from tests.support.rounds import Driver, check_whole, true_routes
from tests.support.wait import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]
TOTAL = 120
RUN = "chaos"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster.start(tmp_path_factory.mktemp("kafka"), die_with_parent=True) as made:
        yield made


@pytest.fixture
def fleet(cluster: LocalCluster, topic_prefix: str, tmp_path: Path) -> Iterator[Launcher]:
    with launcher(tmp_path, cluster.bootstrap, topic_prefix) as made:
        assert made.run("topics", "ensure").returncode == 0
        yield made


@pytest.fixture
def broker(cluster: LocalCluster) -> Iterator[Broker]:
    made = open_broker(cluster.bootstrap)
    yield made
    made.close()


class Watcher:
    """A trainer that reads the stream throughout and looks at every rollout it is given."""

    def __init__(self, broker: Broker, topics: Topics) -> None:
        self._reader = RoutingReader(broker, topics, run=RUN)
        self.seen: dict[str, np.ndarray] = {}
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._reader.rollouts("watcher", idle_timeout=None):
                rollout = item.rollout
                assert len(rollout.routes) == rollout.ref.rows, f"half a rollout: {rollout.ref}"
                self.seen[rollout.ref.attempt] = np.array(rollout.routes)
                item.ack()
        except BaseException as exc:
            self.failure = exc

    def close(self) -> None:
        self._reader.close()
        self._thread.join(30)


def urls(control: ControlClient) -> list[str]:
    """Base URLs of the workers that are ready; none while the broker is away."""
    try:
        workers = control.workers()
    except BrokerUnavailable:
        return []
    members = [member for member in workers if member.live and member.state.ready]
    return sorted(str(member.state.http) for member in members)


@pytest.mark.parametrize("victim", ["worker", "publisher", "store", "broker"])
def test_nothing_acknowledged_is_missing(victim: str, fleet: Launcher, cluster: LocalCluster, broker: Broker) -> None:
    topics = Topics(fleet.prefix)
    workers = {name: fleet.worker(name, "--run", RUN) for name in ("w1", "w2")}
    store = fleet.store()
    for service in (*workers.values(), store):
        service.wait_log("service.ready")
    watcher = Watcher(broker, topics)
    with ControlClient(broker, topics) as control:
        wait_until(lambda: len(urls(control)) == 2, 30, "two workers ready")
        driver = Driver(lambda: urls(control), TOTAL)
        driver.start()
        try:
            wait_until(lambda: len(driver.acknowledged) >= 10, 60, "the round to be under way")
            ids = [control.pause(mode="wait", timeout=30).request_id]
            ids.append(control.update_weights("step-1", timeout=30).request_id)
            # In the middle of the round and with a command on its way:
            pending = control.submit("resume", deadline_s=120)
            if victim == "worker":
                workers["w1"].kill9()
                workers["w1"] = fleet.worker("w1", "--run", RUN)
            elif victim == "publisher":
                sending = wait_until(workers["w1"].publisher_pid, 30, "its publisher's process")
                os.kill(sending, signal.SIGKILL)
                wait_until(lambda: workers["w1"].publisher_pid() not in (0, sending), 30, "another one")
            elif victim == "store":
                store.kill9()
                store = fleet.store()
            else:
                cluster.kill()
                cluster.restart()
            pending.wait(120)
            ids.append(pending.request_id)
            driver.join(120)
        finally:
            driver.close()
        ids.append(control.status(timeout=60).request_id)
        _one_answer_each(broker, topics, ids)
    _all_there(broker, topics, driver)
    wait_until(lambda: watcher.failure or len(watcher.seen) >= TOTAL, 60, "the stream to have brought everything")
    watcher.close()
    assert watcher.failure is None
    for one in driver.acknowledged:
        expected = true_routes(one.version, one.tokens, one.ref.rows)
        np.testing.assert_array_equal(watcher.seen[one.ref.attempt], expected)
    assert {one.version for one in driver.acknowledged} == {"initial", "step-1"}


def test_sigterm_sends_what_was_generated_and_leaves_nothing_running(
    fleet: Launcher, cluster: LocalCluster, broker: Broker
) -> None:
    topics = Topics(fleet.prefix)
    worker = fleet.worker("w1", "--run", RUN)
    worker.wait_log("service.ready")
    sending = worker.publisher_pid()
    assert sending, "a process of its own sends, without a setting"
    with ControlClient(broker, topics) as control:
        (url,) = wait_until(lambda: urls(control), 30, "the worker")
    cluster.freeze()  # nothing is acknowledged yet
    try:
        refs = [_generate(url, number) for number in range(20)]
        worker.process.send_signal(signal.SIGTERM)
    finally:
        cluster.thaw()
    assert worker.wait_exit(30) == 0
    wait_until(lambda: not Path(f"/proc/{sending}").exists(), 30, "its publisher's process to be gone")
    fleet.store().wait_log("service.ready")
    with RoutingReader(broker, topics, run=RUN) as reader:
        for ref in refs:
            assert reader.get(ref.rollout_id, attempt=ref.attempt, wait=60).status == "complete"


def _generate(url: str, number: int) -> RouteRef:
    body = {"token_ids": [1, 2, 3, number], "rollout_id": f"s:{number}:0:0", "max_tokens": 4, "seed": number}
    answer = httpx.post(f"{url}/v1/generate", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return RouteRef.from_dict(answer.json()["route_ref"])


def _all_there(broker: Broker, topics: Topics, driver: Driver) -> None:
    """Every acknowledged rollout is in the store, whole and right."""
    with RoutingReader(broker, topics, run=RUN) as reader:
        for one in driver.acknowledged:
            rollout = reader.get(one.ref.rollout_id, attempt=one.ref.attempt, wait=60)
            check_whole(rollout, one.tokens, one.version)


def _one_answer_each(broker: Broker, topics: Topics, ids: list[str]) -> None:
    """Each command has exactly one final answer of each worker, all good: none was lost, none had two effects."""
    reader = broker.reader("audit")
    reader.assign({TopicPartition(topics.control_responses, 0): 0})
    done: Counter[tuple[str, str]] = Counter()
    while batch := reader.poll(1.0):
        for record in batch:
            body = json.loads(record.value or b"{}")
            if body["phase"] == "done" and body["request_id"] in ids:
                assert body["code"] in ("ok", "already"), body
                done[body["request_id"], body["worker_id"]] += 1
    reader.close()
    assert done == Counter({(request_id, worker): 1 for request_id in ids for worker in ("w1", "w2")})
