"""QuickSelector behaves as the platform's selector, and says nothing long about what it does not know."""

from __future__ import annotations

import selectors
import socket

import pytest

from moebus.broker.kafka.selector import QuickSelector

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Loud(socket.socket):
    def __repr__(self) -> str:
        raise AssertionError("described in words")


def test_keys_are_those_of_the_platform() -> None:
    ours, theirs = QuickSelector(), selectors.DefaultSelector()
    one, other = socket.socketpair()
    with one, other, ours, theirs:
        for chosen in (ours, theirs):
            chosen.register(one, READ, "a")
        assert ours.get_key(one) == theirs.get_key(one) == ours.get_key(one.fileno())
        for chosen in (ours, theirs):
            chosen.modify(one, READ | WRITE, "b")
        assert ours.get_key(one) == theirs.get_key(one)
        assert ours.select(0) == theirs.select(0) != []
        ours.unregister(one)
        with pytest.raises(KeyError):
            ours.get_key(one)
        with pytest.raises(KeyError):
            ours.modify(one, READ)
        assert not ours.get_map()


def test_what_is_not_registered_is_not_described() -> None:
    with QuickSelector() as chosen, Loud() as loud, pytest.raises(KeyError):
        chosen.get_key(loud)


def test_a_closed_socket_is_found_as_by_the_platform() -> None:
    with QuickSelector() as chosen:
        one, other = socket.socketpair()
        chosen.register(one, READ, "a")
        one.close()
        other.close()
        assert chosen.get_key(one).data == "a"
        chosen.unregister(one)
        with pytest.raises(ValueError, match="Invalid file descriptor"):
            chosen.get_key(one)
