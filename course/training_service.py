"""The training service that sells runs: its requests, their ranges, and an HTTP client.

The interface is that of the courses' service of 2025: GET /loss with a model's shape, batch size,
learning rate and FLOPs returns the final loss and the FLOPs used so far. A repeated request is
free. Any object with a `query` method is a service: an HTTP client, or a fake in a test.
"""

import dataclasses
import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, Protocol

from paceline.core.errors import PacelineError, UsageError
from paceline.scaling.surface import tokens_for

TRAIN_FLOPS = tuple(
    sorted([digit * 10.0**power for power in range(13, 18) for digit in (1, 3, 6)] + [1e18])
)
D_MODEL_RANGE = (64, 1024)
NUM_LAYERS_RANGE = (2, 24)
NUM_HEADS_RANGE = (2, 16)
BATCH_SIZES = (128, 256)
LEARNING_RATE_RANGE = (1e-4, 1e-3)
_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1024
_MOST_BYTES = 64 * 1024


class ServiceError(PacelineError):
    """The service refused a run or could not be reached."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run to buy, within the ranges of the service."""

    d_model: int
    num_layers: int
    num_heads: int
    batch_size: int
    learning_rate: float
    train_flops: float

    def __post_init__(self) -> None:
        for field, (low, high) in {
            "d_model": D_MODEL_RANGE,
            "num_layers": NUM_LAYERS_RANGE,
            "num_heads": NUM_HEADS_RANGE,
            "learning_rate": LEARNING_RATE_RANGE,
        }.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise UsageError(f"{field} is {value:g}; the service takes {low:g} to {high:g}")
        if self.batch_size not in BATCH_SIZES:
            raise UsageError(f"batch_size is {self.batch_size}; the service takes 128 or 256")
        if self.train_flops not in TRAIN_FLOPS:
            allowed = ", ".join(f"{flops:g}" for flops in TRAIN_FLOPS)
            raise UsageError(f"train_flops is {self.train_flops:g}; the service takes {allowed}")

    @property
    def parameters(self) -> int:
        """Parameters outside the embedding, as the course counts them: 12 layers d_model²."""
        return 12 * self.num_layers * self.d_model**2

    @property
    def tokens(self) -> float:
        """Training tokens that the FLOPs allow."""
        return float(tokens_for(self.train_flops, self.parameters))

    @property
    def cost(self) -> float:
        """Price of the run: its FLOPs."""
        return self.train_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """The service's answer to a request."""

    loss: float
    total_flops_used: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.loss) and self.loss > 0):
            raise ServiceError(f"the service answered with a loss of {self.loss:g}")


class TrainingService(Protocol):
    """A service that sells runs."""

    def query(self, request: RunRequest) -> Reply:
        """Returns the loss of a new or repeated run."""


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Rejects redirects: keys in the address are for this service only."""

    def redirect_request(self, *_arguments: object) -> None:
        """Makes every redirect an error."""


_OPENER = urllib.request.build_opener(_StayHere)


class HttpTrainingService:
    """A service at a URL; the URL's query fields, such as a key, are sent with each request."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"{url}: an address such as http://localhost:8000 is needed")
        self._parts = parts

    def query(self, request: RunRequest) -> Reply:
        """Requests one run."""
        fields = dict(urllib.parse.parse_qsl(self._parts.query))
        fields |= {name: str(value) for name, value in dataclasses.asdict(request).items()}
        # The service expects budgets as integers.
        fields["train_flops"] = str(int(request.train_flops))
        address = self._parts._replace(
            path=self._parts.path.rstrip("/") + "/loss", query=urllib.parse.urlencode(fields)
        )
        where = f"{self._parts.scheme}://{self._parts.netloc}"
        try:
            try:
                with _OPENER.open(address.geturl(), timeout=_TIMEOUT_S) as answer:
                    content = json.loads(_read(answer))
            except urllib.error.HTTPError as refusal:
                detail = _read(refusal).decode(errors="replace")[:200]
                raise ServiceError(f"{where} refused the run: {refusal.code} {detail}") from refusal
            return Reply(
                loss=float(content["loss"]), total_flops_used=float(content["total_flops_used"])
            )
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
            raise ServiceError(f"{where} gave no loss: {error}; is it running?") from error


def _read(answer: IO[bytes]) -> bytes:
    """Reads an answer, with limits on its time and size."""
    deadline = time.monotonic() + _TIMEOUT_S
    content = b""
    while chunk := answer.read(_CHUNK_BYTES):
        content += chunk
        if len(content) > _MOST_BYTES or time.monotonic() > deadline:
            raise ValueError("its answer is too long, or too slow")
    return content
