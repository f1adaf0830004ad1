"""A real S3 server process on loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from unittest import mock

import pytest

_BUCKET = "paceline-tests"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Starts moto's server, sets the environment variables for it, and yields a bucket's URL."""
    pytest.importorskip("obstore", reason="S3 needs obstore")
    pytest.importorskip("moto.server", reason="moto is the S3 server of the tests")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}"
    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_REGION": "us-east-1",
    }
    try:
        _await(server, endpoint)
        request = urllib.request.Request(f"{endpoint}/{_BUCKET}", method="PUT")
        with urllib.request.urlopen(request), mock.patch.dict(os.environ, variables):
            yield f"s3://{_BUCKET}"
    finally:
        server.kill()
        server.wait()


def _await(server: "subprocess.Popen[bytes]", endpoint: str) -> None:
    for _ in range(300):
        if server.poll() is not None:
            raise RuntimeError(f"the S3 server ended with {server.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(endpoint):
            return
        time.sleep(0.1)
    raise RuntimeError("the S3 server does not answer after 30 s")
