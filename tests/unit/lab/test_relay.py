"""Tests of the switch that delays frames, on sockets in place of interfaces."""

import itertools
import socket
import time
from collections.abc import Iterator

import pytest

from paceline.lab.relay import Relay

_DELAY_S = 0.05
_OFFLOADS = bytes(range(10))
_BROADCAST = b"\xff" * 6


def _frame(destination: bytes, source: bytes, payload: bytes = b"") -> bytes:
    return _OFFLOADS + destination + source + payload


@pytest.fixture
def lines() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Yields three lines: the end of the relay, and the end of the site."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
    for end in itertools.chain(*pairs):
        end.setblocking(False)
    yield pairs
    for end in itertools.chain(*pairs):
        end.close()


def _arrived(end: socket.socket) -> list[bytes]:
    frames = []
    try:
        while True:
            frames.append(end.recv(70_000))
    except BlockingIOError:
        return frames


def test_frames_leave_in_order_after_the_delay_and_unchanged(
    lines: list[tuple[socket.socket, socket.socket]],
) -> None:
    relay = Relay([port for port, _ in lines], _DELAY_S)
    (_, first), (_, second), (_, third) = lines
    sent = [_frame(_BROADCAST, b"source", bytes([number]) * 65_000) for number in range(3)]
    for frame in sent:
        first.send(frame)
    began = time.monotonic()
    relay.forward()
    assert _arrived(second) == []
    while not (frames := _arrived(second)):
        relay.forward()
    assert time.monotonic() - began >= _DELAY_S
    while len(frames) < len(sent):
        relay.forward()
        frames += _arrived(second)
    assert frames == sent
    assert _arrived(third) == sent
    # A frame does not go back to where it comes from.
    assert _arrived(first) == []


def test_a_frame_goes_only_where_its_destination_was_seen(
    lines: list[tuple[socket.socket, socket.socket]],
) -> None:
    relay = Relay([port for port, _ in lines], 0.0)
    (_, first), (_, second), (_, third) = lines

    def pass_on(end: socket.socket, frame: bytes) -> list[list[bytes]]:
        end.send(frame)
        relay.forward()
        return [_arrived(each) for each in (first, second, third)]

    unknown, known = _frame(b"second", b"first "), _frame(b"first ", b"second")
    assert pass_on(first, unknown) == [[], [unknown], [unknown]]
    assert pass_on(second, known) == [[known], [], []]
    assert pass_on(first, unknown) == [[], [unknown], []]
    # The switch of a site passes on what it cannot place yet, although the host is its own.
    own = _frame(b"first ", b"other ")
    assert pass_on(first, own) == [[], [], []]


def test_a_line_that_is_gone_loses_its_frames_and_no_others(
    lines: list[tuple[socket.socket, socket.socket]],
) -> None:
    relay = Relay([port for port, _ in lines], 0.0)
    (_, first), (_, second), (_, third) = lines
    second.close()
    frame = _frame(_BROADCAST, b"first ")
    first.send(frame)
    relay.forward()
    assert _arrived(third) == [frame]
