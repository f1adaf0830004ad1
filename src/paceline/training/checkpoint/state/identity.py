"""Metadata of a run in its checkpoints, sufficient to identify its model."""

import dataclasses
from typing import Any

import msgspec

from paceline.core.specs import ModelShape
from paceline.records.codecs import UNDECODABLE
from paceline.training.checkpoint.catalog import Checkpoint
from paceline.training.checkpoint.errors import CheckpointError
from paceline.training.checkpoint.format.manifest import Json


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and the position of its training."""

    shape: ModelShape | None = None
    """Shape of a `TransformerLM`."""
    hugging_face: dict[str, Any] | None = None
    """config.json of a Hugging Face model that is trained as is."""
    end_of_document: int | None = None
    """Token that ends a document, if known."""
    data: Json = None
    """Position in the data; None for imported weights that were not trained yet."""

    @property
    def model(self) -> dict[str, Any]:
        """Everything that distinguishes the model from others, by name, with derived values."""
        if self.shape is None:
            config = dict(self.hugging_face or {})
            config.pop("transformers_version", None)  # Identifies the writer, not the model.
            return config
        return dataclasses.asdict(
            dataclasses.replace(
                self.shape, head_dim=self.shape.head_width, num_kv_heads=self.shape.key_value_heads
            )
        )

    def difference(self, other: "RunIdentity") -> str:
        """Returns the differences from another model, by name; empty if there are none.

        Args:
            other: Identity to compare this saved one with.
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
    """Returns the identity of the run that saved a checkpoint."""
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
