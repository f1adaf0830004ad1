"""What a run says of itself in its checkpoints, so that one of them suffices to know its model."""

import dataclasses
from typing import Any

import msgspec

from paceline.core.specs import ModelShape
from paceline.records.codecs import UNDECODABLE
from paceline.training.checkpoint.catalog import Checkpoint
from paceline.training.checkpoint.errors import CheckpointError
from paceline.training.checkpoint.format.manifest import Json


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and where its training is."""

    shape: ModelShape | None = None
    """Of a `TransformerLM`."""
    hugging_face: dict[str, Any] | None = None
    """config.json of a Hugging Face model that is trained as it is."""
    end_of_document: int | None = None
    """The token that ends a text, where it is known."""
    data: Json = None
    """Position in the data; None if the weights were imported, and nothing was trained yet."""

    @property
    def model(self) -> dict[str, Any]:
        """All that tells the model from another, by name; derived numbers are written out."""
        if self.shape is None:
            config = dict(self.hugging_face or {})
            config.pop("transformers_version", None)  # Of who wrote it, not of the model.
            return config
        return dataclasses.asdict(
            dataclasses.replace(
                self.shape, head_dim=self.shape.head_width, num_kv_heads=self.shape.key_value_heads
            )
        )

    def difference(self, other: "RunIdentity") -> str:
        """Says by name what another model has otherwise; empty if nothing.

        Args:
            other: What this one, which was saved, is compared with.
        """
        saved, own = self.model, other.model
        if (self.shape is None) != (other.shape is None):
            return f"{self._kind} instead of {other._kind}"
        return ", ".join(
            f"{name} {saved.get(name)} instead of {own.get(name)}"
            for name in dict.fromkeys((*saved, *own))
            if saved.get(name) != own.get(name)
        )

    @property
    def _kind(self) -> str:
        if self.shape is not None:
            return "Paceline's own model"
        return f"a Hugging Face {self.model.get('model_type')}"


def identity_of(checkpoint: Checkpoint) -> RunIdentity:
    """Returns what the run that saved a checkpoint has said of itself."""
    try:
        identity = msgspec.json.decode(checkpoint.manifest.identity, type=RunIdentity)
    except UNDECODABLE as error:
        raise CheckpointError(
            f"{checkpoint.storage.url}: does not record its model: {error}; only checkpoints of "
            "paceline train do, from this version on"
        ) from error
    if identity.shape is None and identity.hugging_face is None:
        raise CheckpointError(
            f"{checkpoint.storage.url}: does not record its model; only checkpoints of paceline "
            "train do"
        )
    return identity
