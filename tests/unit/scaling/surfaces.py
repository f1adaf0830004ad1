"""The surface that made-up runs of the tests lie on."""

from paceline.scaling import LossSurface

SURFACE = LossSurface(
    irreducible=1.8,
    parameter_scale=480.0,
    parameter_exponent=0.35,
    token_scale=2000.0,
    token_exponent=0.37,
)
