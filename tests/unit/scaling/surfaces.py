"""The loss surface of synthetic runs in tests, and published ones."""

import numpy as np

from paceline.scaling import LossSurface

SURFACE = LossSurface(
    irreducible=1.8,
    parameter_scale=480.0,
    parameter_exponent=0.35,
    token_scale=2000.0,
    token_exponent=0.37,
)

HOFFMANN = LossSurface(
    float(np.exp(0.52672)), float(np.exp(6.00734)), 0.33917, float(np.exp(6.01792)), 0.28491
)
"""Hoffmann et al. 2022, approach 3, with the full precision of their source, not as printed."""

HOFFMANN_ROUNDED = LossSurface(1.69, 406.4, 0.34, 410.7, 0.28)
"""The same coefficients as printed in the paper."""
