"""A proxy before an S3 server on loopback: refuses, throttles, cuts off and mixes up answers."""

import contextlib
import http.client
import http.server
import os
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Literal
from unittest import mock

Fault = Literal["throttle", "refuse", "cut", "swap"]

_ERROR = "<Error><Code>{}</Code><Message>{}</Message></Error>"
_ANSWERS = {"throttle": (503, "SlowDown"), "refuse": (403, "AccessDenied")}


class FaultyServer:
    """Decides what happens to the requests for some objects.

    Args:
        port: The port of the server behind the proxy.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.fault: Fault | None = None
        """What happens to a request."""
        self.left = 0
        """To how many requests it still happens."""
        self.ending = ""
        """How the names of the objects end to which it happens."""
        self.num_faults = 0

    def next_fault(self, path: str) -> Fault | None:
        """Returns what happens to a request for a path."""
        if self.fault is None or self.left <= 0 or not path.partition("?")[0].endswith(self.ending):
            return None
        self.left -= 1
        self.num_faults += 1
        return self.fault

    @contextlib.contextmanager
    def failing(self, fault: Fault, *, times: int = 10**9, ending: str = "") -> Iterator[None]:
        """Lets requests fail for as long as the context lasts."""
        self.fault, self.left, self.ending, self.num_faults = fault, times, ending, 0
        try:
            yield
        finally:
            self.fault = None


def _handler(faulty: FaultyServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(length)
            fault = faulty.next_fault(self.path)
            if fault in _ANSWERS:
                status, code = _ANSWERS[fault]
                self._send(status, {}, _ERROR.format(code, "by the test").encode())
                return
            behind = http.client.HTTPConnection("127.0.0.1", faulty.port)
            behind.request(self.command, self.path, content, dict(self.headers))
            answer = behind.getresponse()
            body = answer.read()
            behind.close()
            if fault == "swap":
                body = body[::-1]
            left_out = ("content-length", "connection", "transfer-encoding", "server", "date")
            headers = {k: v for k, v in answer.getheaders() if k.lower() not in left_out}
            declared = int(answer.headers.get("Content-Length") or len(body))
            self._send(answer.status, headers, body, declared=declared, is_cut=fault == "cut")

        def _send(
            self,
            status: int,
            headers: dict[str, str],
            body: bytes,
            *,
            declared: int | None = None,
            is_cut: bool = False,
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if declared is None else declared))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
            self.close_connection = is_cut

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def faulty_server() -> Iterator[FaultyServer]:
    """Stands before the S3 server of the environment, and in its place there."""
    port = urllib.parse.urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert port is not None
    faulty = FaultyServer(port)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(faulty)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": endpoint}):
            yield faulty
        server.shutdown()
        thread.join()
