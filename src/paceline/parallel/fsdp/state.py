"""Loading of saved state: full tensors, and DTensors on any mesh."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.core.errors import UsageError
from paceline.parallel.fsdp.layer import ShardedLayer
from paceline.parallel.fsdp.parameter import LayerParameter
from paceline.parallel.fsdp.sharding import as_dtensor


class LoadsFullTensors:
    """Reduces loaded tensors to this rank's rows; full tensors need no communication.

    Args:
        module: The inner module, whose names the state uses.
        layers: The layers of its parameters.
    """

    def __init__(self, module: nn.Module, layers: Sequence[ShardedLayer]) -> None:
        self.are_values_missing = False
        """Whether the parameters have no values until a state is loaded."""
        homes = {p.shard: (layer, p) for layer in layers for p in layer.parameters}
        self._places = {
            name: homes[parameter]
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        module.register_load_state_dict_pre_hook(self._cut)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(self._note)  # type: ignore[no-untyped-call]

    def require_values(self) -> None:
        """Raises if the parameters have no values yet."""
        if self.are_values_missing:
            raise UsageError(
                "the module was created on the meta device, and its parameters have no values "
                "yet; pass initialize=... to the container, or load a state dictionary"
            )

    def _note(self, _module: nn.Module, _incompatible: Any) -> None:
        self.are_values_missing = False

    def _cut(
        self,
        _module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_: object,
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise UsageError(
                "load_state_dict(assign=True) would replace the parameters of the container; load "
                "without assign=True"
            )
        for name, (layer, parameter) in self._places.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.full.shape:
                state[prefix + name] = _own_rows(value, layer, parameter)


def _own_rows(value: Tensor, layer: ShardedLayer, parameter: LayerParameter) -> Tensor:
    if isinstance(value, DTensor):
        spec = parameter.spec
        if spec is not None and (value.device_mesh, value.placements) == (
            spec.mesh,
            spec.placements,
        ):
            return value
        value = value.full_tensor()
    if parameter.spec is None:
        return value
    rows = value.detach()
    if rows.dim():
        rows = parameter.piece.own_rows(rows, layer.sharding.shard)
    return as_dtensor(rows, parameter.spec)
