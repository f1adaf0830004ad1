"""The loss surface L = E + A/N^alpha + B/D^beta, and the optimal use of compute that it implies.

N is parameters, D is tokens, and training costs C = 6 N D. At a fixed C the loss is lowest
where the two reducible terms fall equally fast, alpha A/N^alpha = beta B/D^beta, so that the best
N grows as C^(beta/(alpha+beta)) and its loss is E plus a single power of C. All functions accept
arrays. N and D are always related by C = 6 N D and never fitted separately.

Reference: Hoffmann et al. 2022 (arXiv 2203.15556), approach 3, and its replication by Besiroglu
et al. 2024 (arXiv 2404.10102).
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UsageError

Array = npt.NDArray[np.float64]
Numbers = npt.ArrayLike

FLOPS_PER_PARAMETER_AND_TOKEN = 6.0


@dataclasses.dataclass(frozen=True)
class LossSurface:
    """The five coefficients, in the order in which they appear in the formula."""

    irreducible: float
    """E, the loss in the limit of infinite model size and data."""
    parameter_scale: float
    """A, the scale of the term that falls with parameters."""
    parameter_exponent: float
    """alpha, the exponent of N."""
    token_scale: float
    """B, the scale of the term that falls with tokens."""
    token_exponent: float
    """beta, the exponent of D."""

    def __post_init__(self) -> None:
        for field, value in dataclasses.asdict(self).items():
            if not np.isfinite(value) or value < 0 or (value == 0 and field != "irreducible"):
                raise UsageError(f"LossSurface.{field} is {value}; it must be positive and finite")

    def loss(self, parameters: Numbers, tokens: Numbers) -> Array:
        """Returns the loss of models with `parameters` after training on `tokens`."""
        by_parameters = self.parameter_scale * np.asarray(parameters) ** -self.parameter_exponent
        by_tokens = self.token_scale * np.asarray(tokens) ** -self.token_exponent
        return np.asarray(self.irreducible + by_parameters + by_tokens, dtype=np.float64)

    def log_slopes(self, parameters: Array, tokens: Array, centre: tuple[float, float]) -> Array:
        """Returns the derivatives of the log loss by the coefficients, one row per run.

        Runs have `parameters` and `tokens`. The coefficients are E, the log of the N term, alpha,
        the log of the D term, and beta, with both terms evaluated at `centre`, an N and a D near
        the middle of the runs.
        """
        log_n, log_d = np.log(parameters / centre[0]), np.log(tokens / centre[1])
        by_n = self.parameter_scale * parameters**-self.parameter_exponent
        by_d = self.token_scale * tokens**-self.token_exponent
        columns = [np.ones_like(by_n), by_n, -by_n * log_n, by_d, -by_d * log_d]
        return np.stack(columns, axis=1) / (self.irreducible + by_n + by_d)[:, None]

    @property
    def allocation_exponent(self) -> float:
        """Exponent of C in the best N."""
        return self.token_exponent / (self.parameter_exponent + self.token_exponent)

    @property
    def loss_exponent(self) -> float:
        """Exponent of C with which the reducible loss of the best model falls."""
        return self.parameter_exponent * self.allocation_exponent

    def optimal_parameters(self, compute: Numbers) -> Array:
        """Returns the number of parameters with the lowest loss for `compute` FLOPs."""
        _, *coefficients = dataclasses.astuple(self)
        return optimal_parameters(compute, *coefficients)

    def optimal_tokens(self, compute: Numbers) -> Array:
        """Returns the number of tokens for the best model at `compute` FLOPs: C / 6N."""
        return tokens_for(compute, self.optimal_parameters(compute))

    def optimal_loss(self, compute: Numbers) -> Array:
        """Returns the lowest loss for `compute` FLOPs."""
        parameters = self.optimal_parameters(compute)
        return self.loss(parameters, tokens_for(compute, parameters))

    def compute_for_loss(self, loss: Numbers) -> Array:
        """Returns the FLOPs that the best model needs to reach `loss`."""
        reducible_at_one = self.optimal_loss(1.0) - self.irreducible
        reducible = np.asarray(loss, dtype=np.float64) - self.irreducible
        if np.any(reducible <= 0):
            raise UsageError(
                f"no compute reaches a loss of {np.min(loss):.4g}: the irreducible loss is "
                f"{self.irreducible:.4g}"
            )
        return np.asarray((reducible_at_one / reducible) ** (1 / self.loss_exponent))

    def wasted_compute(self, compute: Numbers, parameters: Numbers) -> Array:
        """Returns the fraction of `compute` wasted by a model with `parameters`.

        The best model reaches the loss of a suboptimal one with less compute; the difference is
        the waste, as a fraction of `compute`.
        """
        loss = self.loss(parameters, tokens_for(compute, parameters))
        # Rounding could give -0.00% at the optimum.
        saved = 1 - self.compute_for_loss(loss) / np.asarray(compute)
        return np.asarray(np.maximum(saved, 0.0))


def optimal_parameters(
    compute: Numbers,
    parameter_scale: Numbers,
    parameter_exponent: Numbers,
    token_scale: Numbers,
    token_exponent: Numbers,
) -> Array:
    """Returns (alpha A / beta B)^(1/(alpha+beta)) (C/6)^(beta/(alpha+beta)), elementwise."""
    alpha, beta = np.asarray(parameter_exponent), np.asarray(token_exponent)
    ratio = (alpha * parameter_scale) / (beta * token_scale)
    product = np.asarray(compute, dtype=np.float64) / FLOPS_PER_PARAMETER_AND_TOKEN
    total = alpha + beta
    return np.asarray(ratio ** (1 / total) * product ** (beta / total))


def compute_for(parameters: Numbers, tokens: Numbers) -> Array:
    """Returns 6ND."""
    size = np.asarray(parameters, dtype=np.float64)
    return np.asarray(FLOPS_PER_PARAMETER_AND_TOKEN * size * np.asarray(tokens, dtype=np.float64))


def tokens_for(compute: Numbers, parameters: Numbers) -> Array:
    """Returns C / 6N."""
    return np.asarray(np.asarray(compute, dtype=np.float64) / compute_for(parameters, 1.0))


EPOCH = LossSurface(1.817, 482.0, 0.348, 2085.0, 0.366)
"""Besiroglu et al. 2024, the replication of Hoffmann's fit, with the reported digits."""
