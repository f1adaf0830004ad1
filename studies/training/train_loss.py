"""Compares the held-out loss of the trainer with that of a hand-written loop.

Both train the same model on the same tokens in the same order: the trainer on two ranks with
micro-batches, the loop in one process with plain torch (its own AdamW with decay groups, cosine
schedule and clipping). Appends one `comparison` record with both held-out losses to the store.

    python -m studies.training.train_loss results/train-loss.jsonl tokens
"""

import math
import pathlib
import sys
import tempfile

import torch
import torch.nn.functional as F

from paceline.data.loader.config import SourceConfig
from paceline.data.loader.torch_batches import TorchLoader
from paceline.models import TransformerLM
from paceline.parallel import run_ranks
from paceline.training.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
    StepConfig,
)
from paceline.training.metrics import EvaluationRow, MetricsFile
from studies.harness.records import append_record, machine_case
from studies.harness.runs import train_rank
from studies.harness.study import study_parser

HELD_OUT = 64


def by_hand(_rank: int, _world_size: int, config: RunConfig) -> float:
    """Trains with a hand-written loop; returns the held-out loss."""
    torch.manual_seed(config.training.seed)
    model = TransformerLM(config.model.shape)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.optimizer.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(config.optimizer.beta1, config.optimizer.beta2),
    )
    steps, warmup = config.training.steps, config.schedule.warmup_steps
    loader = TorchLoader(config.loader())
    for step in range(steps):
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
        factor = (step + 1) / warmup if step < warmup else cosine
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.learning_rate * factor
        batch = next(loader)
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip_norm)
        optimizer.step()
    held_out = TorchLoader(config.loader("heldout"))
    losses = []
    with torch.no_grad():
        for _ in range(HELD_OUT // config.training.batch_size):
            batch = next(held_out)
            logits = model(batch.tokens).flatten(0, 1)
            losses.append(F.cross_entropy(logits, batch.targets.flatten()).item())
    return sum(losses) / len(losses)


def main() -> int:
    """Trains both ways; prints and records the losses."""
    parser = study_parser(__doc__)
    parser.add_argument("tokens", help="a dataset of paceline data prepare --tokenizer bytes")
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        config = RunConfig(
            out=f"{directory}/run",
            model=ModelConfig(num_layers=4, d_model=128, d_ff=384, num_heads=4),
            data=DataConfig(sources=(SourceConfig(place=arguments.tokens),), context_length=128),
            training=StepConfig(steps=arguments.steps, batch_size=16, micro_batch_size=4),
            checkpoint=CheckpointConfig(every_steps=10**6),
            evaluation=EvaluationConfig(every_steps=10**6, sequences=HELD_OUT),
        )
        run_ranks(train_rank, 2, config, timeout_s=3600)
        rows = MetricsFile(pathlib.Path(config.out) / "metrics.jsonl").read()
        own = [row.loss for row in rows if isinstance(row, EvaluationRow)][-1]
        (bare,) = run_ranks(by_hand, 1, config, timeout_s=3600)
    case = {
        "subject": "paceline train, 2 ranks, ddp",
        "baseline": "bare loop, 1 process",
        "operation": f"held-out loss after {arguments.steps} steps",
        "batch": config.training.batch_size,
        "context": config.data.context_length,
        **machine_case(),
    }
    numbers = {"loss": own, "baseline_loss": bare, "loss_difference": abs(own - bare) / bare}
    append_record(arguments.store, "comparison", case, numbers)
    print(f"{own:.5f}, by hand {bare:.5f}: {abs(own - bare) / bare:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
