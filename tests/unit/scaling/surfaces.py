"""The loss surface of synthetic runs in tests."""

from paceline.scaling import LossSurface

SURFACE = LossSurface(
    irreducible=1.8,
    parameter_scale=480.0,
    parameter_exponent=0.35,
    token_scale=2000.0,
    token_exponent=0.37,
)
