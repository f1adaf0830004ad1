"""Tests of one training step in one process: what it sums, clips, applies and tells."""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.data.audit import DIGEST_PARTS
from paceline.parallel.ranks.heartbeats import Phase
from paceline.training import step as step_module
from paceline.training.config import StepConfig
from paceline.training.parallelize import DataShard, TrainState
from paceline.training.step import StepResult, TrainingStep, micro_batches

BATCH, CONTEXT, VOCABULARY, RATE = 5, 3, 7, 0.5


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank has the sum of all ranks already."""
    monkeypatch.setattr(dist, "all_reduce", lambda sums: None)


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))


def _last(model: nn.Module) -> Tensor:
    return list(model.parameters())[-1].detach().clone()


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(2))
    return tokens, (tokens + 1) % VOCABULARY


def _step(
    model: nn.Module,
    *,
    shard: DataShard | None = None,
    batch_size: int = BATCH,
    micro_batch_size: int = BATCH,
    clip_norm: float = 0.0,
    **others: Any,
) -> TrainingStep:
    config = StepConfig(
        batch_size=batch_size, micro_batch_size=micro_batch_size, clip_norm=clip_norm
    )
    train_state = SimpleNamespace(
        model=model,
        optimizers={"sgd": torch.optim.SGD(model.parameters(), lr=RATE)},
        data_shard=shard or DataShard.of_data_parallel(0, 1),
        parallel_model=None,
        outer=None,
    )
    return TrainingStep(config, cast(TrainState, train_state), torch.device("cpu"), **others)


def _expected() -> tuple[float, list[Tensor]]:
    """Returns the mean loss of the batch and its gradients, by torch alone."""
    model, (tokens, targets) = _model(), _batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def _norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(each.square().sum()) for each in gradients))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5])
def test_micro_batches_have_the_loss_and_gradients_of_the_batch(micro_batch_size: int) -> None:
    loss, gradients = _expected()
    model = _model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = _step(model, micro_batch_size=micro_batch_size).run(*_batch())
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.gradient_norm == pytest.approx(_norm(gradients), rel=1e-5)
    for old, new, gradient in zip(before, model.parameters(), gradients, strict=True):
        torch.testing.assert_close(new.detach(), old - RATE * gradient)
        assert new.grad is None


def test_a_rank_scales_its_part_for_the_average_over_ranks() -> None:
    """Three of five sequences of a batch, whose loss two ranks compute, of four that average."""
    shard = DataShard(
        data_rank=0, data_ranks=2, gradient_ranks=4, loss_weight=0.5, counts_data=False
    )
    model, (tokens, targets) = _model(), _batch()
    step = _step(model, shard=shard, micro_batch_size=2)
    loss = step.forward_and_backward(tokens[:3], targets[:3])
    own = F.cross_entropy(model(tokens[:3]).flatten(0, 1), targets[:3].flatten(), reduction="sum")
    assert float(loss) == pytest.approx(own.item() / (BATCH * CONTEXT), rel=1e-5)
    found = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    (4 * own / (BATCH * CONTEXT)).backward()  # type: ignore[no-untyped-call]
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    result = _step(_model(), shard=shard, micro_batch_size=2).run(
        tokens[:3], targets[:3], digest=2**60 + 5
    )
    assert result.loss == pytest.approx(0.5 * float(loss), rel=1e-5)
    assert result.digest == 0  # Another rank of its data-parallel group counts the sequences.


def test_gradients_are_clipped_and_the_norm_before_is_told() -> None:
    _, gradients = _expected()
    norm = _norm(gradients)
    model = _model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = _step(model, clip_norm=norm / 4).run(*_batch())
    assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
    moved = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    assert _norm(moved) == pytest.approx(RATE * norm / 4, rel=1e-3)


@pytest.mark.parametrize("stop", [False, True])
def test_requests_to_stop_and_digests_are_told(stop: bool) -> None:
    digest = 2**63 + 12345
    result = _step(_model()).run(*_batch(), stop=stop, digest=digest)
    assert (result.stop, result.digest, result.is_committed) == (stop, digest, True)


@pytest.mark.parametrize("micro_batch_size", [BATCH, 2])
def test_no_logits_are_held_while_backward_or_the_next_pass_runs(micro_batch_size: int) -> None:
    model = _model()
    made: list[weakref.ref[Tensor]] = []
    held: list[int] = []

    def look(*_: object) -> None:
        held.append(sum(logits() is not None for logits in made))

    model.register_forward_pre_hook(look)
    model.register_forward_hook(lambda _module, _inputs, out: made.append(weakref.ref(out)))
    next(model.parameters()).register_hook(look)
    _step(model, micro_batch_size=micro_batch_size).forward_and_backward(*_batch())
    assert len(made) == -(-BATCH // micro_batch_size)
    assert held == [0] * 2 * len(made)


def test_a_step_is_finite_if_loss_and_norm_are() -> None:
    result = StepResult(loss=1.0, gradient_norm=1.0, stop=False, digest=0)
    assert result.is_finite
    assert not dataclasses.replace(result, loss=math.nan).is_finite
    assert not dataclasses.replace(result, gradient_norm=math.inf).is_finite


def test_an_update_that_is_not_finite_is_not_applied() -> None:
    model = _model()
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.inf
    before = [parameter.detach().clone() for parameter in model.parameters()]
    tokens, targets = torch.zeros(BATCH, CONTEXT, dtype=torch.int64), _batch()[1]
    result = _step(model).run(tokens, targets)
    assert not result.is_finite
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
        assert new.grad is None


@pytest.mark.parametrize("answer", [False, True])
def test_the_monitor_decides_on_its_notes(answer: bool) -> None:
    asked: list[tuple[float, float, list[float]]] = []

    def should_apply(loss: float, norm: float, notes: list[float]) -> bool:
        asked.append((loss, norm, notes))
        return answer

    monitor = SimpleNamespace(notes=lambda: (0.25, 7.0), should_apply=should_apply)
    model = _model()
    before = _last(model)
    result = _step(model, monitor=monitor).run(*_batch(), digest=2**60)
    assert asked == [(result.loss, result.gradient_norm, [0.25, 7.0])]
    assert torch.equal(before, _last(model)) != answer
    assert DIGEST_PARTS > 1  # The notes follow all parts of the digest.


class _Replicas:
    """Two replicas with the same numbers, that share a batch of another size."""

    batch_size = 2 * BATCH
    members = SimpleNamespace(live=2)

    def __init__(self, *, commits: bool) -> None:
        self._commits = commits
        self.passes: list[int] = []

    def add_up(self, sums: Tensor) -> None:
        sums *= 2

    def commit(self) -> bool:
        return self._commits

    @contextlib.contextmanager
    def summed(self, passes: int) -> Iterator[None]:
        self.passes.append(passes)
        yield


@pytest.mark.parametrize("commits", [False, True])
def test_replicas_sum_and_commit(commits: bool) -> None:
    loss, _ = _expected()
    model, replicas = _model(), _Replicas(commits=commits)
    before = _last(model)
    step = _step(model, micro_batch_size=2, replicas=replicas)
    result = step.run(*_batch(), digest=3)
    assert replicas.passes == [3]  # Each of two replicas has five of ten sequences, in pairs.
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert (result.digest, result.is_committed) == (6, commits)
    assert torch.equal(before, _last(model)) != commits


def test_every_phase_is_told_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[Phase] = []
    monkeypatch.setattr(step_module, "beat", phases.append)
    _step(_model(), micro_batch_size=3).run(*_batch())
    passes = [Phase.FORWARD, Phase.BACKWARD] * 2
    assert phases == [*passes, Phase.ALL_REDUCE, Phase.UPDATE]


class _CountingModel(DistributedDataParallel):
    """Torch's DDP as far as a step knows it: it counts passes, and those that average."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.inner = module
        self.passes: list[tuple[int, bool]] = []
        self.num_backwards = 0
        self._averages = True

    def forward(self, tokens: Tensor) -> Any:
        self.passes.append((len(tokens), self._averages))
        logits = self.inner(tokens)
        logits.register_hook(self._count)
        return logits

    def _count(self, _gradient: Tensor) -> None:
        self.num_backwards += 1

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._averages = False
        yield
        self._averages = True


def test_torchs_ddp_learns_its_graph_from_a_pass_that_changes_nothing() -> None:
    """It records the graph in the first pass, in which it must average gradients."""
    loss, gradients = _expected()
    model = _CountingModel(_model())
    step = _step(model, micro_batch_size=2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    random_state = torch.random.get_rng_state()
    result = step.run(*_batch())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert model.passes == [(1, True), (2, False), (2, False), (1, True)]
    assert model.num_backwards == 4
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for old, new, gradient in zip(before, model.parameters(), gradients, strict=True):
        torch.testing.assert_close(new.detach(), old - RATE * gradient)
    model.passes.clear()
    step.run(*_batch())
    assert model.passes == [(2, False), (2, False), (1, True)]


@pytest.mark.parametrize(
    ("micro_batch_size", "passes"), [(5, [(5, True)]), (3, [(1, True), (3, False), (2, True)])]
)
def test_one_pass_needs_nothing_to_be_learnt(
    micro_batch_size: int, passes: list[tuple[int, bool]]
) -> None:
    model = _CountingModel(_model())
    _step(model, micro_batch_size=micro_batch_size).run(*_batch())
    assert model.passes == passes


def test_a_pipeline_runs_its_own_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[Phase] = []
    monkeypatch.setattr(step_module, "beat", phases.append)
    shard = DataShard(
        data_rank=0, data_ranks=1, gradient_ranks=4, loss_weight=1.0, counts_data=True
    )
    step = _step(_model(), shard=shard)
    pipeline = SimpleNamespace(forward_and_backward=lambda *_: torch.tensor(12.0))
    step._parallel_model = cast(Any, SimpleNamespace(splits_vocabulary=False, pipeline=pipeline))
    assert float(step.forward_and_backward(*_batch())) == 3
    assert phases == [Phase.FORWARD]


def test_a_part_without_sequences_runs_a_pass_that_does_not_count() -> None:
    tokens, targets = _batch()
    found = list(micro_batches(tokens[:2], targets[:2], 3))
    assert [(len(inputs), counts) for inputs, _, counts in found] == [
        *((1, True), (1, True), (1, False))
    ]
    torch.testing.assert_close(found[2][0], tokens[:1])
    torch.testing.assert_close(found[2][1], targets[:1])
    model = _model()
    loss = _step(model, batch_size=3, micro_batch_size=1).forward_and_backward(
        tokens[:2], targets[:2]
    )
    expected = F.cross_entropy(
        model(tokens[:2]).flatten(0, 1), targets[:2].flatten(), reduction="sum"
    )
    assert float(loss) == pytest.approx(expected.item() / (3 * CONTEXT), rel=1e-5)
