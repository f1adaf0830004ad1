"""The terms fitted for each pool of rows, selected by held-out error and regret.

The default terms are a separate attention rate, matmul sizes, exposed traffic and latencies. A term
that raised the held-out error of a pool is removed, and one that lowered it is added.
`docs/planner-accuracy.md` lists the effect of each term. Pools without an entry get the defaults.
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
    """Returns the terms of a pool. All llm-foundry pools share the same terms."""
    if pool.startswith("llm-foundry-"):
        return _TERMS["llm-foundry"]
    return _TERMS.get(pool, USUAL_TERMS)
