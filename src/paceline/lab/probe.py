"""Measures the real rate of a link with one short TCP stream, counted at the receiver.

``python -m paceline.lab.probe receive ADDRESS`` prints the port that it listens on, then the
payload bits per second; ``python -m paceline.lab.probe send ADDRESS PORT BUFFER`` sends to it.
"""

import socket
import statistics
import subprocess
import sys
import time

from paceline.lab.network import Host, LabError

_WARMUP_S = 0.15
_DURATION_S = 0.8
# The rate is the median over windows, so that scheduling pauses of this process do not affect it.
_WINDOW_S = 0.05
_CHUNK_BYTES = 1 << 16
# Data still queued when the sender stops must drain, so the buffer holds a fraction of a second.
_QUEUE_S = 0.1
_BUFFER_BYTES_RANGE = (1 << 16, 1 << 22)
_TIMEOUT_S = 20.0


def measure_link(sender: Host, receiver: Host, rate_bits_per_s: float | None = None) -> float:
    """Returns the rate at which payload arrives from one host at another, in bits per second."""
    smallest, largest = _BUFFER_BYTES_RANGE
    queue_bytes = largest if rate_bits_per_s is None else int(rate_bits_per_s / 8 * _QUEUE_S)
    buffer_bytes = min(largest, max(smallest, queue_bytes))
    module = [sys.executable, "-m", "paceline.lab.probe"]
    listen = [*receiver.prefix, *module, "receive", receiver.address]
    receiving = subprocess.Popen(listen, stdout=subprocess.PIPE, text=True)
    try:
        assert receiving.stdout is not None
        port = receiving.stdout.readline().strip()
        sender.run(*module, "send", receiver.address, port, str(buffer_bytes))
        measured, _ = receiving.communicate(timeout=_TIMEOUT_S)
        return float(measured)
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise LabError(f"no data passes the link between the hosts: {error}") from error
    finally:
        receiving.kill()
        receiving.wait()


def _receive(address: str) -> None:
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
        while time.perf_counter() - begin < _WARMUP_S:
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


def _send(address: str, port: int, buffer_bytes: int) -> None:
    with socket.create_connection((address, port), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        chunk = bytes(_CHUNK_BYTES)
        deadline = time.perf_counter() + _WARMUP_S + _DURATION_S
        while time.perf_counter() < deadline:
            connection.sendall(chunk)


if __name__ == "__main__":
    mode, target, *rest = sys.argv[1:]
    if mode == "receive":
        _receive(target)
    else:
        _send(target, *(int(number) for number in rest))
