"""Case fields that several kinds of records share."""

from paceline.core.specs import BatchShape, ModelShape
from paceline.records.schema import CaseValue


def model_case_fields(name: str, shape: ModelShape, batch: BatchShape) -> dict[str, CaseValue]:
    """Returns what a case says of the model and the batch of one rank."""
    return {
        "model": name,
        "vocab_size": shape.vocab_size,
        "d_model": shape.d_model,
        "d_ff": shape.d_ff,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.key_value_heads,
        "head_dim": shape.head_width,
        "tied_embeddings": shape.tied_embeddings,
        "batch": batch.num_sequences,
        "context": batch.context_length,
    }
