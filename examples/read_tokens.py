"""Reads batches of a prepared dataset, stops, and resumes with another number of ranks.

    paceline data prepare corpus --tokenizer bytes --out tokens
    python examples/read_tokens.py tokens

The order of samples depends on the seed alone. Two ranks read the first three steps, three ranks
resume from their state, and the digests equal those of one rank that reads all six.
"""

import argparse

from paceline.data.loader.config import LoaderConfig, SourceConfig
from paceline.data.loader.loader import TokenLoader


# --8<-- [start:read]
def read(config: LoaderConfig, world_size: int, num_steps: int, state: dict | None) -> list[dict]:
    """Reads steps on every rank and prints their digests; returns the final state of each rank."""
    loaders = [TokenLoader(config, rank=rank, world_size=world_size) for rank in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    for _ in range(num_steps):
        batches = [next(loader) for loader in loaders]
        digest = sum(batch.digest for batch in batches) % 2**64
        tokens = sum(batch.tokens.size for batch in batches)
        print(f"step {batches[0].step}: {tokens} tokens, digest {digest:016x}")
    states = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        loader.close()
    return states


# --8<-- [end:read]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens", help="a dataset of paceline data prepare")
    arguments = parser.parse_args()
    config = LoaderConfig(
        sources=(SourceConfig(place=arguments.tokens),), context_length=64, batch_size=12, seed=1
    )
    states = read(config, world_size=2, num_steps=3, state=None)
    assert all(state == states[0] for state in states), "the state does not know ranks"
    read(config, world_size=3, num_steps=3, state=states[0])
