"""The real rate of a link: one short TCP stream between two hosts, whose payload is counted."""

import socket
import statistics
import subprocess
import sys
import time

from paceline.lab.network import Host, LabError
from paceline.lab.relay import force_buffer

_RECEIVE = "from paceline.lab.bandwidth import receive; receive()"
_SEND = "from paceline.lab.bandwidth import send; send()"
_WARMUP_S = 0.15
_DURATION_S = 0.8
# The rate is the median over windows, so that scheduling pauses of this process do not affect it.
_WINDOW_S = 0.05
_CHUNK_BYTES = 1 << 16
# TCP begins with a few packets, and doubles what it sends with every round trip.
_WARMUP_ROUND_TRIPS = 10
_LONGEST_WARMUP_S = 5.0
# Data still queued when the sender stops must drain, so the buffer holds a fraction of a second.
_BUFFER_S = 0.1
_BUFFER_BYTES_RANGE = (1 << 16, 1 << 22)
_TIMEOUT_S = 20.0


def measure_link(
    sender: Host, receiver: Host, rate_bits_per_s: float | None = None, delay_s: float = 0.0
) -> float:
    """Returns the rate at which payload arrives from one host at another, in bits per second.

    Args:
        sender: The host that sends.
        receiver: The host that counts.
        rate_bits_per_s: Rate of the slowest shaped link between them, if any is.
        delay_s: Delay of a packet from one to the other.
    """
    round_trip_s = 2 * delay_s
    smallest, largest = _BUFFER_BYTES_RANGE
    queue_bytes = largest if rate_bits_per_s is None else int(rate_bits_per_s / 8 * _BUFFER_S)
    buffer_bytes = min(largest, max(smallest, queue_bytes))
    # What is sent stays in the buffer until the receiver has acknowledged it.
    buffer_bytes += int((rate_bits_per_s or 0.0) / 8 * round_trip_s)
    warmup_s = _WARMUP_S + min(_WARMUP_ROUND_TRIPS * round_trip_s, _LONGEST_WARMUP_S)
    program = [sys.executable, "-c"]
    listen = [*receiver.prefix, *program, _RECEIVE, receiver.address, str(warmup_s)]
    receiving = subprocess.Popen(listen, stdout=subprocess.PIPE, text=True)
    try:
        assert receiving.stdout is not None
        port = receiving.stdout.readline().strip()
        sender.run(*program, _SEND, receiver.address, port, str(warmup_s), str(buffer_bytes))
        measured, _ = receiving.communicate(timeout=_TIMEOUT_S)
        return float(measured)
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise LabError(f"no data passes the link between the hosts: {error}") from error
    finally:
        receiving.kill()
        receiving.wait()


def receive() -> None:
    """Prints a port of the address in its arguments, then the bits per second after a warm-up."""
    address, warmup_s = sys.argv[1:]
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_TIMEOUT_S)
        buffer = bytearray(_CHUNK_BYTES)
        begin = time.perf_counter()
        # Exclude the token bucket's burst and TCP slow start.
        while time.perf_counter() - begin < float(warmup_s):
            connection.recv_into(buffer)
        rates = []
        begin, num_bytes = time.perf_counter(), 0
        while count := connection.recv_into(buffer):
            num_bytes += count
            elapsed = time.perf_counter() - begin
            if elapsed >= _WINDOW_S:
                rates.append(num_bytes * 8 / elapsed)
                begin, num_bytes = time.perf_counter(), 0
    sys.stdout.write(f"{statistics.median(rates)}\n")


def send() -> None:
    """Sends to the address and port of its arguments; then come the warm-up and the buffer."""
    address, port, warmup_s, buffer_bytes = sys.argv[1:]
    with socket.create_connection((address, int(port)), timeout=_TIMEOUT_S) as connection:
        force_buffer(connection, socket.SO_SNDBUF, int(buffer_bytes))
        chunk = bytes(_CHUNK_BYTES)
        deadline = time.perf_counter() + float(warmup_s) + _DURATION_S
        while time.perf_counter() < deadline:
            connection.sendall(chunk)
