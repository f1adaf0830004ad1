"""The program that connects sites with a delay, where the kernel has no netem.

It is a learning switch in the namespace of the lab's switches. Each site's uplink ends at an
interface that only this program reads, through a packet socket. A frame is kept for the delay, then
written to the interface behind which its destination was last seen, or else to all others. The
kernel shapes the uplinks before and after that, so every program on the hosts sees the delay as it
would see a real one.

Frames carry the header that describes checksums and segments left to the hardware, so TCP's large
segments pass in one piece, at a fraction of the cost of frames of Ethernet's size.
"""

import collections
import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Sequence

# From linux/if_ether.h, linux/if_packet.h and asm-generic/socket.h; `socket` does not have them.
_ALL_PROTOCOLS = 3
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_PACKET_IGNORE_OUTGOING = 23
_FORCED = {socket.SO_SNDBUF: 32, socket.SO_RCVBUF: 33}

# The length of the header of offloads before each frame, then the addresses of an Ethernet frame.
_OFFLOADS = 10
_DESTINATION = slice(_OFFLOADS, _OFFLOADS + 6)
_SOURCE = slice(_OFFLOADS + 6, _OFFLOADS + 12)
_LARGEST_BYTES = 66_000
"""Size of the largest segment, with all headers."""
_BUFFER_BYTES = 1 << 26
"""Room for what arrives while this process waits for a core, and for the queue of an uplink."""
_FRAMES_AT_ONCE = 64


def relay() -> None:
    """Forwards frames until it is killed; the arguments are the delay and the interfaces."""
    delay_s, *interfaces = sys.argv[1:]
    # A network does not wait for the cores that the hosts compute on; only root may say so.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(
            0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
        )
    switch = Relay([_open(interface) for interface in interfaces], float(delay_s))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        switch.forward()


def _open(interface: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    # Otherwise the port would receive what it has just sent.
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    force_buffer(port, socket.SO_SNDBUF, _BUFFER_BYTES)
    force_buffer(port, socket.SO_RCVBUF, _BUFFER_BYTES)
    port.bind((interface, _ALL_PROTOCOLS))
    port.setblocking(False)
    return port


def force_buffer(connection: socket.socket, option: int, num_bytes: int) -> None:
    """Sets the size of a socket's buffer; only root may exceed the limit of the machine."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, _FORCED[option], num_bytes)
    except PermissionError:
        connection.setsockopt(socket.SOL_SOCKET, option, num_bytes)


class Relay:
    """Ports of a switch, the addresses last seen behind them, and the frames on their way."""

    def __init__(self, ports: Sequence[socket.socket], delay_s: float) -> None:
        self._ports = ports
        self._delay_s = delay_s
        self._behind: dict[bytes, socket.socket] = {}
        # All frames take equally long, so they leave in the order of their arrival.
        self._on_way: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()

    def forward(self) -> None:
        """Waits until a frame arrives or is due, and takes in or sends out all such frames."""
        wait_s = None
        if self._on_way:
            wait_s = max(0.0, self._on_way[0][0] - time.monotonic())
        arrived, _, _ = select.select(self._ports, [], [], wait_s)
        for port in arrived:
            self._take_in(port)
        while self._on_way and self._on_way[0][0] <= time.monotonic():
            _, port, frame = self._on_way.popleft()
            self._send_out(port, frame)

    def _take_in(self, port: socket.socket) -> None:
        # A read fails when no more frames are there, and once after the uplink has been cut.
        with contextlib.suppress(OSError):
            for _ in range(_FRAMES_AT_ONCE):
                frame = port.recv(_LARGEST_BYTES)
                self._behind[frame[_SOURCE]] = port
                self._on_way.append((time.monotonic() + self._delay_s, port, frame))

    def _send_out(self, arrived_at: socket.socket, frame: bytes) -> None:
        known = self._behind.get(frame[_DESTINATION])
        for port in self._ports if known is None else [known]:
            if port is not arrived_at:
                # A full queue and an uplink that is cut lose the frame.
                with contextlib.suppress(OSError):
                    port.send(frame)
