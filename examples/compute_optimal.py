"""Draws a noisy sweep from a known surface, fits it, and compares the answer with the truth."""

import numpy as np

from paceline.scaling import LossSurface, decide, diagnose, fit, predict, synthetic_sweep

truth = LossSurface(
    irreducible=1.8,
    parameter_scale=480.0,
    parameter_exponent=0.35,
    token_scale=2000.0,
    token_exponent=0.37,
)
found = fit(synthetic_sweep(truth, noise=0.003), num_draws=200)

answer = predict(found.parametric, np.array([1e23])).parameters.at(0)
print(f"parametric: N = {answer.value:.3g} ({answer.low:.3g} to {answer.high:.3g})")
for finding in diagnose(found, [1e23]):
    print(finding.name, "-", finding.remedy)
(decision,) = decide(found, [1e23])
print(f"train {decision.run.shape.num_layers} layers of {decision.run.shape.d_model}")
print(f"truth: N = {float(truth.optimal_parameters(1e23)):.3g}")
