"""Any causal language model of transformers, called as ours is: tokens in, logits out.

What it is made of is not known here. So nothing of it is recomputed or compiled block by block, no
memory and no step time is predicted, and what it generates is computed without a cache.
"""

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.models.hugging_face.files import CONFIG, read_config, weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PREFIX = "inner."


class HuggingFaceLM(nn.Module):
    """A model of transformers.

    Args:
        inner: What AutoModelForCausalLM returns.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @classmethod
    def of_config(cls, config: Mapping[str, Any], where: str = CONFIG) -> "HuggingFaceLM":
        """Builds the model that config.json describes, with random weights in float32."""
        settings = _settings(config, where)
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_config(settings, dtype=torch.float32))

    @classmethod
    def of_directory(cls, directory: pathlib.Path) -> "HuggingFaceLM":
        """Builds a model in float32, with the weights of its directory if it has any."""
        config = read_config(directory)
        if not weight_files(directory):
            return cls.of_config(config, str(directory / CONFIG))
        settings = _settings(config, str(directory / CONFIG))
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # Every rank would show one.
        inner = AutoModelForCausalLM.from_pretrained(
            directory,
            config=settings,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
        )
        return cls(inner)

    @property
    def max_context_length(self) -> int | None:
        """Longest sequence that the model accepts, if it says so."""
        length: int | None = getattr(self.inner.config, "max_position_embeddings", None)
        return length

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next token at every position."""
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits


def hugging_face_layout(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns config.json of a trained model, and what its tensors are called in its files.

    Of tensors that share their numbers, as tied embeddings do, the first is in the files.

    Args:
        config: As the model was built with.
    """
    with torch.device("meta"):
        inner = HuggingFaceLM.of_config(config).inner
    kept = {name for name, _ in (*inner.named_parameters(), *inner.named_buffers())}
    names = {f"{_PREFIX}{name}": name for name in inner.state_dict() if name in kept}
    return {**config, "architectures": [type(inner).__name__]}, names


def _settings(config: Mapping[str, Any], where: str) -> "PretrainedConfig":
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{where}: Hugging Face models need the package transformers; "
            "pip install 'paceline[hf]'"
        ) from error
    if "model_type" not in config:
        raise UsageError(f"{where}: model_type is missing")
    try:
        settings: PretrainedConfig = AutoConfig.for_model(**config)
    except ValueError as error:
        raise UsageError(
            f"{where}: transformers knows no model_type {config['model_type']!r}; code that comes "
            "with a model is not run"
        ) from error
    return settings
