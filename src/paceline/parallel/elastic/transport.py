"""Transfer of a replica's state to a replica that heals.

torchft's own transport listens on every interface and unpickles any data that it receives. This
transport listens on one address and accepts only tensors and plain values.
"""

import datetime
import http.server
import socket
import urllib.request
from typing import Any

from torch.distributed._serialization import _streaming_load
from torchft.checkpointing import http_transport
from torchft.checkpointing.http_transport import HTTPTransport


class StateTransport(HTTPTransport[Any]):  # type: ignore[misc]
    """Serves the state of this replica on one address.

    Args:
        address: The address to listen on.
        timeout: Timeout for fetching and serving the state.
    """

    def __init__(self, address: str, timeout: datetime.timedelta) -> None:
        self._address = address

        class Server(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

            def __init__(self, _everywhere: object, handler: Any) -> None:
                super().__init__((address, 0), handler)

        # Patches the server class: torchft has no other way to choose the address.
        torchfts = http_transport._IPv6HTTPServer
        http_transport._IPv6HTTPServer = Server
        try:
            super().__init__(timeout=timeout, num_chunks=0)
        finally:
            http_transport._IPv6HTTPServer = torchfts

    def address(self) -> str:
        """Returns the URL from which other replicas fetch the state."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    @classmethod
    def _load_from_address(cls, address: str, timeout: datetime.timedelta) -> object:
        with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as answer:
            state: object = _streaming_load(answer, weights_only=True)
            return state
