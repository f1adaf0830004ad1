"""Shapes and types of the numerical rooms are checked at run time, in tests only."""

import jaxtyping

with jaxtyping.install_import_hook(["paceline.kernels", "paceline.models"], "beartype.beartype"):
    import paceline.kernels
    import paceline.models  # noqa: F401
