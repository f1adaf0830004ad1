"""Trains a transformers model under any strategy, in a loop with the arguments of its Trainer.

    python examples/elsewhere/hugging_face.py --strategy zero2 --ranks 2

The same batches are divided among any number of ranks, so that the printed losses depend neither on
the number of ranks nor on the strategy.
"""

import argparse
import dataclasses

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from paceline.core.strategies import StrategyName, find_strategy
from paceline.parallel import distributed_session
from paceline.parallel.strategies import apply_strategy, clip_grad_norm, make_optimizer


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Training arguments, named as in transformers.TrainingArguments."""

    learning_rate: float = 5e-3
    max_steps: int = 5
    warmup_steps: int = 1
    train_batch_size: int = 8
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "cosine"


CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


# --8<-- [start:loop]
def train(strategy: StrategyName, ranks: int | None, arguments: Arguments) -> None:
    """Trains a small Llama; rank 0 prints the mean loss of every step."""
    with distributed_session(ranks_per_host=ranks, timeout_s=60) as session:
        torch.manual_seed(0)
        model = apply_strategy(strategy, LlamaForCausalLM(CONFIG).to(session.device))
        optimizer = make_optimizer(strategy, model, torch.optim.AdamW, lr=arguments.learning_rate)
        scheduler = get_scheduler(
            arguments.lr_scheduler_type, optimizer, arguments.warmup_steps, arguments.max_steps
        )
        generator = torch.Generator().manual_seed(1)
        for step in range(arguments.max_steps):
            batch = torch.randint(64, (arguments.train_batch_size, 32), generator=generator)
            own = batch[session.rank :: session.world_size].to(session.device)
            loss = model(input_ids=own, labels=own).loss
            loss.backward()
            clip_grad_norm(model, arguments.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            # --8<-- [end:loop]
            mean = loss.detach() / session.world_size
            dist.all_reduce(mean)
            if session.rank == 0:
                print(f"step {step}: loss {mean.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", type=find_strategy, default="ddp")
    parser.add_argument("--ranks", type=int, default=None, help="ranks to start where none are")
    parsed = parser.parse_args()
    train(parsed.strategy, parsed.ranks, Arguments())
