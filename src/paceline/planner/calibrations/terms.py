"""Which terms each pool of rows is fitted with: those that lowered held-out errors or regret there.

Every pool begins with attention's own rate, matmul sizes, exposed traffic and latencies. A term
that raised the error of models that were held out is left out, and one that lowered it is added:
`docs/planner-accuracy.md` has what each brought. A pool of one's own rows gets the usual terms.
"""

USUAL_TERMS = ("attention", "matmul_size", "exposed", "latency")
_TERMS: dict[str, tuple[str, ...]] = {
    "bloom": (*USUAL_TERMS, "alignment"),
    "llm-foundry": (*USUAL_TERMS, "step", "cells"),
    "megatron-bridge-experts": ("attention", "matmul_size"),
    "nemo-h100-sxm-bfloat16": ("attention", "matmul_size", "exposed"),
    "nemo-h100-sxm-float8": ("matmul_size",),
    "vtrain": ("attention", "exposed", "latency"),
    "vtrain-host": (*USUAL_TERMS, "dispatch", "step", "cells"),
}


def terms_of(pool: str) -> tuple[str, ...]:
    """Returns the terms of a pool, or of the framework whose devices are pools."""
    if pool.startswith("llm-foundry-"):
        return _TERMS["llm-foundry"]
    return _TERMS.get(pool, USUAL_TERMS)
