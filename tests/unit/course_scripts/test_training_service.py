"""Tests of the client against invalid, empty, oversized, redirected and slow replies."""

import contextlib
import http.server
import threading
from collections.abc import Iterator

import pytest
import training_service
from training_service import HttpTrainingService, RunRequest, ServiceError

REQUEST = RunRequest(
    d_model=512, num_layers=8, num_heads=8, batch_size=128, learning_rate=3e-4, train_flops=1e15
)


@contextlib.contextmanager
def _answering(
    body: bytes, *, status: int = 200, headers: dict[str, str] | None = None, drips: bool = False
) -> Iterator[str]:
    """Serves one reply to every request on loopback; with `drips`, blanks follow it slowly."""
    stopped = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)
                for _ in range(100 if drips else 0):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    if stopped.wait(0.05):
                        break

        def log_message(self, *_arguments: object) -> None:
            """Suppresses the log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"<html>",
        b'{"loss": null, "total_flops_used": 1}',
        b'{"loss": 3.0}',
        b"\xff\xfe",
        b'{"loss": 3, "total_flops_used": ' + b"1" * 70_000 + b"}",
    ],
)
def test_nonsense_is_named_as_the_services(body: bytes) -> None:
    with _answering(body) as address, pytest.raises(ServiceError, match="gave no loss"):
        HttpTrainingService(address).query(REQUEST)


@pytest.mark.parametrize("loss", [b"NaN", b"-1", b"0", b"Infinity"])
def test_a_loss_that_is_none_is_refused(loss: bytes) -> None:
    body = b'{"loss": ' + loss + b', "total_flops_used": 1}'
    with _answering(body) as address, pytest.raises(ServiceError, match="with a loss of"):
        HttpTrainingService(address).query(REQUEST)


def test_redirections_are_not_followed() -> None:
    good = b'{"loss": 3.0, "total_flops_used": 1e15}'
    with _answering(good) as elsewhere:
        assert HttpTrainingService(elsewhere).query(REQUEST).loss == 3.0
        moved = _answering(b"", status=302, headers={"Location": elsewhere})
        with moved as address, pytest.raises(ServiceError, match="refused the run: 302"):
            HttpTrainingService(address).query(REQUEST)


def test_an_answer_that_drips_does_not_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_service, "_TIMEOUT_S", 0.5)
    with _answering(b"{", drips=True) as address, pytest.raises(ServiceError, match="too slow"):
        HttpTrainingService(address).query(REQUEST)


def test_an_address_without_a_port_is_no_traceback() -> None:
    with pytest.raises(ServiceError, match="gave no loss"):
        HttpTrainingService("http://127.0.0.1:abc").query(REQUEST)
