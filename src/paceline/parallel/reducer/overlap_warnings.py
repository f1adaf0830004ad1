"""Warnings, given once, about causes that prevent overlap of communication with backward."""

import warnings
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import Node

_COMPILED = "Compiled"


class OverlapWarning(UserWarning):
    """Communication that could have overlapped with backward did not."""


class OverlapMonitor:
    """Inspects the graph and gradient arrivals of a container that sends during backward."""

    def __init__(self) -> None:
        self._has_seen_graph = False
        self._warned_of_missing = False

    def look_at_graph(self, outputs: Iterable[Tensor]) -> None:
        """Warns if one compiled graph computes all gradients, so that all arrive at the end."""
        if self._has_seen_graph:
            return
        self._has_seen_graph = True
        sources = _sources_of_gradients(outputs)
        if len(sources) == 1 and _COMPILED in sources.pop().name():
            _warn(
                "the model is compiled as a whole: all its gradients become complete together at "
                "the end of backward, so nothing can be sent during backward. Compile each block "
                "instead (for block in model.blocks: block.compile())"
            )

    def look_at_arrivals(self, names: Sequence[str], arrived: Sequence[int]) -> None:
        """Warns if a parameter had no gradient."""
        if all(arrived) or self._warned_of_missing:
            return
        self._warned_of_missing = True
        _warn(
            f"parameter {names[arrived.index(0)]!r} had no gradient on this rank: the buckets "
            "from its own on were sent only after backward. explain_unused() lists all such "
            "parameters; freeze those that are never used (requires_grad_(False))"
        )


def _sources_of_gradients(outputs: Iterable[Tensor]) -> set[Node]:
    """Returns graph nodes that pass gradients to parameters; stops once two are found."""
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    sources: set[Node] = set()
    while waiting and len(sources) < 2:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if hasattr(following, "variable"):
                sources.add(node)
            elif following not in seen:
                seen.add(following)
                waiting.append(following)
    return sources


def _warn(message: str) -> None:
    # All calling frames belong to the container or the autograd engine, none to user code.
    warnings.warn(message, OverlapWarning, stacklevel=2)
