"""Measures the overhead of Paceline's model and harness over a bare loop in plain torch.

The bare loop below shares no code with Paceline: it has its own Transformer and its own timer. Both
use the same weights and the same batch. Their steps alternate in one process, so that other load on
the machine affects both. Appends one `comparison` record to the store.

    python -m studies.training.harness_overhead results/harness-overhead.jsonl
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.benchmarks.config import StepSweep
from paceline.benchmarks.harness.measure import ratio_metric
from paceline.benchmarks.step import TimedStep
from paceline.core import ModelShape
from paceline.records import Metric
from studies.harness.records import append_record, machine_case
from studies.harness.study import study_parser
from studies.harness.turns import interleaved

WARMUP = 3


class BareBlock(nn.Module):
    """A minimal pre-norm block."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        d, f = shape.d_model, shape.d_ff
        self.heads = shape.num_heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.w2 = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Runs the block."""
        b, s, d = x.shape

        def rotate(y: Tensor) -> Tensor:
            left, right = y.chunk(2, dim=-1)
            return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)

        h = F.rms_norm(x, (d,), self.norm1, 1e-5)
        q, k, v = (
            linear(h).view(b, s, self.heads, -1).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, d))
        h = F.rms_norm(x, (d,), self.norm2, 1e-5)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class BareModel(nn.Module):
    """Embedding, blocks, norm, output layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(BareBlock(shape) for _ in range(shape.num_layers))
        self.norm = nn.Parameter(torch.ones(shape.d_model))
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        self.width, self.theta = shape.head_width, shape.rope_theta

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits."""
        frequencies = self.theta ** (-torch.arange(0, self.width, 2) / self.width)
        angles = torch.outer(torch.arange(tokens.shape[1]), frequencies)
        cosine, sine = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(F.rms_norm(x, self.norm.shape, self.norm, 1e-5))


def copy_weights(bare: BareModel, step: TimedStep) -> None:
    """Copies the weights of Paceline's model to the bare model."""
    source = iter(
        [
            step.model.embedding.weight,
            *(
                parameter
                for block in step.model.blocks
                for parameter in (
                    block.attention_norm.weight,
                    block.feed_forward_norm.weight,
                    block.attention.query.weight,
                    block.attention.key.weight,
                    block.attention.value.weight,
                    block.attention.output.weight,
                    block.feed_forward.gate.weight,
                    block.feed_forward.up.weight,
                    block.feed_forward.down.weight,
                )
            ),
            step.model.final_norm.weight,
            step.model.head.weight,
        ]
    )
    target = [
        bare.embedding.weight,
        *(
            parameter
            for block in bare.blocks
            for parameter in (
                *(block.norm1, block.norm2),
                *(block.q.weight, block.k.weight, block.v.weight, block.o.weight),
                *(block.w1.weight, block.w3.weight, block.w2.weight),
            )
        ),
        bare.norm,
        bare.head.weight,
    ]
    with torch.no_grad():
        for parameter in target:
            parameter.copy_(next(source))


def bare_step(model: BareModel, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Runs forward and backward, and returns the seconds of each."""
    model.zero_grad(set_to_none=True)
    started = time.perf_counter()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    forward_ended = time.perf_counter()
    loss.backward()
    return {
        "forward_time_s": forward_ended - started,
        "backward_time_s": time.perf_counter() - forward_ended,
    }


def main() -> int:
    """Measures, prints and records the ratios."""
    parser = study_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--model", default="small")
    arguments = parser.parse_args()

    sweep = StepSweep(model=(arguments.model,), phase=("forward-backward",), device="cpu")
    case = next(sweep.cases())
    step = TimedStep(case, torch.device("cpu"))
    bare = BareModel(case.shape)
    copy_weights(bare, step)
    torch.testing.assert_close(bare(step.inputs), step.model(step.inputs), atol=1e-4, rtol=1e-4)

    ways = {"paceline": step.run, "bare": lambda: bare_step(bare, step.inputs, step.targets)}
    laps = interleaved(ways, arguments.rounds, warmup=WARMUP)
    ratios: dict[str, Metric] = {}
    times: dict[str, list[float]] = {}
    for lap in laps["bare"][0]:
        subject, baseline = ([each[lap] for each in laps[name]] for name in ways)
        ratios[lap.replace("_time_s", "_ratio")] = ratio_metric(subject, baseline)
        times |= {lap: subject, f"baseline_{lap}": baseline}
    facts = {
        "subject": "paceline bench step",
        "baseline": "bare torch loop",
        "model": arguments.model,
        "batch": case.batch.num_sequences,
        "context": case.batch.context_length,
        "phase": case.phase,
        **machine_case(),
        "warmup": WARMUP,
        "rounds": arguments.rounds,
    }
    append_record(arguments.store, "comparison", facts, {**ratios, **times})
    for name, ratio in ratios.items():
        print(f"{name}: {ratio.value:.4f} (95% {ratio.low:.4f} to {ratio.high:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
