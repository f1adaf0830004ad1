"""Suite sizes for each kind of machine: models, message sizes, samples."""

import dataclasses
from typing import Literal

from paceline.core.strategies import StrategyName

PresetName = Literal["laptop", "2gpu", "8gpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the cases of a preset."""

    device: str
    models: dict[str, float]
    """Models of the step benchmark, each with its approximate duration in seconds."""
    step_warmup: int
    steps: int
    small_model: str
    """Model for warm-up, compilation and traces."""
    contexts: tuple[int, ...]
    """Contexts of the memory timelines; the forward pass uses the first."""
    attention_widths: tuple[int, ...]
    attention_lengths: tuple[int, ...]
    compiled_lengths: tuple[int, ...]
    implementations: tuple[str, ...]
    flash_widths: tuple[int, ...]
    flash_lengths: tuple[int, ...]
    attention_limit_s: int
    messages: tuple[str, ...]
    world_sizes: tuple[int, ...]
    lab_rates: tuple[str, ...]
    parallel_model: str
    """Model for comparing strategies; up to ten variants are in memory at once."""
    parallel_batch: int
    bucket_sizes: tuple[int | str, ...]
    rounds: int
    round_s: float
    """Approximate duration of one round of the parallel model with one strategy."""
    sharded_model: str
    sharded_ranks: int
    sharded: tuple[StrategyName, ...]
    architectures: tuple[str, ...]
    seconds: float
    """Approximate duration of a medium-sized case."""


_QUICK_LAPTOP = Scale(
    device="cpu",
    models={"bytes-6M": 12, "bytes-34M": 25},
    step_warmup=1,
    steps=3,
    small_model="bytes-6M",
    contexts=(256, 128),
    attention_widths=(64,),
    attention_lengths=(256, 1024, 4096),
    compiled_lengths=(1024,),
    implementations=("naive", "tiled", "sdpa"),
    flash_widths=(64,),
    flash_lengths=(512, 2048),
    attention_limit_s=1,
    messages=("1MB", "10MB", "100MB"),
    world_sizes=(2, 4),
    lab_rates=("1gbit",),
    parallel_model="bytes-34M",
    parallel_batch=2,
    bucket_sizes=(1, 100),
    rounds=3,
    round_s=2.0,
    sharded_model="bytes-34M",
    sharded_ranks=2,
    sharded=("torch_ddp", "sharded_optimizer"),
    architectures=("sm90",),
    seconds=15,
)
_LAPTOP = dataclasses.replace(
    _QUICK_LAPTOP,
    models={"bytes-34M": 40, "small": 70, "medium": 180, "large": 400, "xl": 15, "2.7B": 15},
    step_warmup=2,
    steps=6,  # The minimum for a comparison to reach a verdict.
    small_model="small",
    contexts=(256, 128, 512),
    attention_widths=(16, 32, 64, 128),
    attention_lengths=(256, 1024, 4096, 8192, 16384),
    compiled_lengths=(256, 1024, 4096),
    flash_widths=(16, 64, 128),
    flash_lengths=(128, 1024, 4096, 16384),
    attention_limit_s=5,
    messages=("1MB", "10MB", "100MB", "1GB"),
    world_sizes=(2, 4, 6),
    lab_rates=("200mbit", "1gbit", "2gbit"),
    parallel_batch=4,
    bucket_sizes=(1, 10, 100, 1000, "auto"),
    rounds=20,
    round_s=3.0,
    sharded_model="small",
    sharded=("torch_ddp", "torch_zero", "sharded_optimizer", "sharded", "fully_sharded"),
    architectures=("sm80", "sm90", "sm100"),
    seconds=45,
)
_GPU = dataclasses.replace(
    _LAPTOP,
    device="cuda",
    models={"small": 30, "medium": 40, "large": 50, "xl": 60, "2.7B": 60},
    step_warmup=5,
    steps=10,
    implementations=("naive", "tiled", "sdpa", "triton"),
    flash_widths=(16, 32, 64, 128),
    flash_lengths=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    attention_limit_s=10,
    world_sizes=(2,),
    lab_rates=(),
    parallel_model="medium",
    bucket_sizes=(1, 10, 100, 1000),
    rounds=20,
    round_s=1.0,
    sharded_model="xl",
)


_QUICK_GPU = dataclasses.replace(
    _GPU,
    models={"small": 30, "medium": 40},
    steps=5,
    rounds=5,
    parallel_model="small",
    sharded_model="medium",
    attention_widths=(64,),
    flash_widths=(64,),
    flash_lengths=(1024, 4096, 16384),
    seconds=30,
)


def find_scale(preset: PresetName, *, quick: bool) -> Scale:
    """Returns the scale of a preset; `quick` selects smaller models, fewer sizes and samples."""
    if preset == "laptop":
        return _QUICK_LAPTOP if quick else _LAPTOP
    scale = _QUICK_GPU if quick else _GPU
    if preset == "8gpu":
        world_sizes = (2, 8) if quick else (2, 4, 6, 8)
        return dataclasses.replace(scale, world_sizes=world_sizes, sharded_ranks=8)
    return scale
