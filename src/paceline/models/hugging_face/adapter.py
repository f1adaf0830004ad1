"""Any causal language model of transformers, with our model's interface: tokens in, logits out.

Its structure is not known here. So there is no activation checkpointing, no compilation by block,
no prediction of memory or step time, and generation runs without a cache.
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
    """Wraps a model of transformers.

    Args:
        inner: A model returned by AutoModelForCausalLM.
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
        """Builds a model in float32, with the weights in its directory if there are any."""
        config = read_config(directory)
        if not weight_files(directory):
            return cls.of_config(config, str(directory / CONFIG))
        settings = _settings(config, str(directory / CONFIG))
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # Otherwise every rank shows one.
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
        """Longest sequence that the model accepts; None if its config does not state it."""
        length: int | None = getattr(self.inner.config, "max_position_embeddings", None)
        return length

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next token at every position."""
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits


def hugging_face_layout(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns config.json of a trained model, and the names of its tensors in the files.

    Of tensors that share storage, such as tied embeddings, only the first is in the files.

    Args:
        config: The config that the model was built with.
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
