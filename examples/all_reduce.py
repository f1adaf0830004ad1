"""Every rank contributes its number plus one and checks the sum.

The same file runs directly, under torchrun, under Slurm and in the lab:

    python examples/all_reduce.py --ranks 2
    torchrun --nproc-per-node 2 examples/all_reduce.py
    srun --ntasks 2 python examples/all_reduce.py
    paceline lab run --hosts 2 --rate 1gbit -- python examples/all_reduce.py
"""

import argparse
import sys

import torch
import torch.distributed as dist

from paceline.parallel import distributed_session

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=None, help="ranks to start where none are")
parser.add_argument("--fail-on-rank", type=int, default=None, help="exit with code 3 there")
arguments = parser.parse_args()

with distributed_session(ranks_per_host=arguments.ranks, timeout_s=60) as session:
    if session.rank == arguments.fail_on_rank:
        sys.exit(3)
    values = torch.full((1000,), session.rank + 1.0, device=session.device)
    dist.all_reduce(values)
    expected = session.world_size * (session.world_size + 1) / 2
    if not bool((values == expected).all()):
        sys.exit(f"rank {session.rank}: got {values[0].item()}, expected {expected}")
    if session.rank == 0:
        print(f"{session.world_size} ranks on {session.placement.num_hosts} host(s): {expected:g}")
