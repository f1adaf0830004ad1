"""What the courses' own tests do with the adapters, and stricter: different weights per rank."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.parallel import RankPool
from tests import adapters
from tests.distributed.toys import Frozen, Tied, data

Pools = Callable[[int], RankPool]


def _course_loop(
    rank: int, world_size: int, edition: str, tied: bool, bucket_size_mb: float | None
) -> None:
    torch.manual_seed(rank)
    inner = Tied() if tied else Frozen()
    torch.manual_seed(0)
    alone = Tied() if tied else Frozen()
    if edition == "bucketed":
        model = adapters.get_ddp_bucketed(inner, bucket_size_mb=bucket_size_mb)
    elif edition == "individual":
        model = adapters.get_ddp_individual_parameters(inner)
    else:
        model = adapters.get_ddp(inner)
    after = {
        "bucketed": adapters.ddp_bucketed_on_after_backward,
        "individual": adapters.ddp_individual_parameters_on_after_backward,
        "2026": adapters.ddp_on_after_backward,
    }[edition]
    assert model.module is inner
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    loss = nn.MSELoss()
    for step in range(5):
        if edition == "bucketed":
            adapters.ddp_bucketed_on_train_batch_start(ddp_model=model, optimizer=optimizers[0])
        everything = torch.cat([data(step, other) for other in range(world_size)])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model(data(step, rank), rank), data(step + 50, rank)).backward()
        after(ddp_model=model, optimizer=optimizers[0])
        targets = torch.cat([data(step + 50, other) for other in range(world_size)])
        loss(alone(everything, rank), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        for (name, expected), (_, actual) in zip(
            alone.named_parameters(), model.named_parameters(), strict=True
        ):
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("edition", "bucket_size_mb"),
    [
        ("individual", None),
        ("2026", None),
        *(("bucketed", size) for size in (0.0016, 0.0001, 0.01, None)),
    ],
)
def test_the_courses_loop(
    rank_pool: Pools, edition: str, tied: bool, bucket_size_mb: float | None
) -> None:
    rank_pool(2).run(_course_loop, edition, tied, bucket_size_mb)


@pytest.mark.parametrize(
    ("adapter", "arguments"),
    [
        (adapters.get_flashattention_autograd_function_pytorch, ()),
        (adapters.get_flashattention_autograd_function_triton, ()),
        (adapters.get_sharded_optimizer, ([], torch.optim.AdamW)),
        (adapters.get_fsdp, (nn.Linear(1, 1),)),
        (adapters.fsdp_on_after_backward, (nn.Linear(1, 1), None)),
        (adapters.fsdp_gather_full_params, (nn.Linear(1, 1),)),
    ],
)
def test_what_is_missing_is_named(adapter: Callable[..., object], arguments: tuple[object]) -> None:
    with pytest.raises(NotImplementedError, match=r"does not have .+ yet"):
        adapter(*arguments)
