"""Answers that arrive in pieces of any size come out of our frames as they were sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebus.broker.kafka import frames  # isort: skip  # before the client itself, whose import warns

from kafka.errors import KafkaProtocolError
from kafka.protocol import parser
from kafka.protocol.consumer.fetch import FetchRequest, FetchResponse
from kafka.protocol.sasl import SaslBytesRequest

VERSION = 12


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    frames.install()
    frames.install()  # again: nothing


def asking(numbers: list[int]) -> Any:
    """A connection that waits for these answers."""
    made = parser.KafkaProtocol(client_id="test")
    for number in numbers:
        request = FetchRequest[VERSION]()
        request.with_header(correlation_id=number, client_id="test")
        made.in_flight_requests.append(request.header)
    return made


def answer(number: int, records: bytes | None) -> bytes:
    kind = FetchResponse[VERSION]
    topic_kind = kind.FetchableTopicResponse
    part = topic_kind.PartitionData(partition_index=3, error_code=0, high_watermark=number, records=records)
    topic = topic_kind(topic="routes", partitions=[part])
    made = kind(throttle_time_ms=0, error_code=0, session_id=0, responses=[topic])
    made.with_header(correlation_id=number)
    return bytes(made.encode(framed=True, header=True))


def held(response: Any) -> tuple[int, bytes | None]:
    part = response.responses[0].partitions[0]
    assert (response.responses[0].topic, part.partition_index) == ("routes", 3)
    return part.high_watermark, part.records


LARGE = bytes(range(256)) * 2 * (frames.SHORT // 256)
SENT = [(1, b"x" * 3_000), (2, b""), (3, None), (4, bytes(range(256)) * 40), (5, LARGE)]


@given(st.lists(st.integers(1, 50_000), max_size=40))
def test_wherever_they_are_cut(sizes: list[int]) -> None:
    stream = b"".join(answer(number, records) for number, records in SENT)
    connection, found, at = asking([number for number, _ in SENT]), [], 0
    for size in [*sizes, len(stream)]:
        found += connection.receive_bytes(stream[at : at + size])
        at += size
    assert [(number, held(response)) for number, response in found] == [(n, (n, records)) for n, records in SENT]


@pytest.mark.parametrize("sent", [b"y" * 100, LARGE])
def test_records_outlive_the_frame_and_are_plain_bytes(sent: bytes) -> None:
    connection = asking([1])
    ((_, response),) = connection.receive_bytes(answer(1, sent))
    records = held(response)[1]
    connection.receive_bytes(b"")
    assert type(records) is bytes
    assert records == sent


def test_the_tokens_of_a_sasl_exchange_without_frames_of_fields_are_bytes() -> None:
    """With brokers that know only the first version of it: SCRAM and OAUTHBEARER decode them."""
    connection = parser.KafkaProtocol(client_id="test")
    connection.send_request(SaslBytesRequest(b"n,,n=user,r=1"))
    token = b"r=12,s=c2FsdA==,i=4096"
    ((_, response),) = connection.receive_bytes(len(token).to_bytes(4, "big") + token)
    assert response.auth_bytes.decode() == token.decode()


def test_the_answer_to_another_question_is_refused_as_before() -> None:
    with pytest.raises(KafkaProtocolError):
        asking([1]).receive_bytes(answer(2, b"z"))  # another number
