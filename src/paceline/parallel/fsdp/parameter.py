"""One parameter of a fully sharded model: this rank's rows, and temporarily all rows."""

import dataclasses

from torch import Tensor, nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from paceline.core.errors import UsageError
from paceline.parallel.buckets import local_tensor
from paceline.parallel.fsdp.layout import Piece
from paceline.parallel.fsdp.sharding import as_dtensor


@dataclasses.dataclass(eq=False, kw_only=True)
class LayerParameter:
    """One parameter in its sharded and full form."""

    name: str
    """Name in the inner module."""
    piece: Piece
    shard: nn.Parameter
    """The parameter of optimizers: a DTensor with this rank's rows, or a full plain tensor."""
    local: Tensor
    """This rank's rows, in the flat shard."""
    full: nn.Parameter
    """All rows, while the layer is gathered."""
    spec: DTensorSpec | None
    """Spec of the DTensor; None for a plain parameter."""

    def require_in_place(self) -> None:
        """Raises if the shard is no longer a view of the flat shard, which is gathered."""
        own = local_tensor(self.shard)
        if own.dtype != self.local.dtype or own.device != self.local.device:
            raise UsageError(
                f"parameter {self.name!r} was converted to {own.dtype} on {own.device} after its "
                f"container was created for {self.local.dtype} on {self.local.device}; convert "
                "the model before wrapping it"
            )
        if own.data_ptr() != self.local.data_ptr():
            raise UsageError(
                f"the memory of parameter {self.name!r} was replaced after its container was "
                "created; change its values in place, with copy_ or load_state_dict"
            )

    def add_gradient(self, mean: Tensor) -> None:
        """Adds a mean to the shard's gradient, or sets it if there is none."""
        if self.shard.grad is not None:
            local_tensor(self.shard.grad).add_(mean)
        else:
            self.shard.grad = mean if self.spec is None else as_dtensor(mean, self.spec)
