"""State dicts of a rank's layers and optimizer, in which the experts of all ranks appear as one tensor."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stretto.ir.errors import PipelineError
from stretto.moe.experts import Experts, sharded_experts
from stretto.pipeline.names import Names


class States:
    """Saves and loads the state of one rank's layers, under the names that users see.

    Experts of which this rank holds some are DTensors over the "ep" ranks, sharded by expert. They share memory with
    the parameters.
    """

    def __init__(
        self, module: nn.ModuleDict, layers: Mapping[int, nn.Module], names: Names, mesh: DeviceMesh, rank: int
    ) -> None:
        self._module, self._layers, self._names = module, layers, names
        self._mesh, self._rank = mesh, rank

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of all layers."""
        state, sharded = self._module.state_dict(keep_vars=True), self._sharded()
        whole = {
            name: _whole(value.detach(), sharded[id(value)], self._mesh) if id(value) in sharded else value.detach()
            for name, value in state.items()
        }
        return dict(self._names.all_seen(whole.items()))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load all layers from a state dict, which may contain other layers too."""
        own, sharded = self._names.own(state, self._layers), self._sharded()
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if id(parameter) in sharded and name in own:
                own[name] = _own_part(self._names.seen(name), own[name], sharded[id(parameter)], parameter)
        try:
            self._module.load_state_dict(own)
        except RuntimeError as error:
            if type(error) is not RuntimeError or not str(error).startswith("Error(s) in loading"):
                raise  # raised by a layer's own code
            text = self._names.in_text(str(error))
            raise RuntimeError(text.replace("ModuleDict", f"the layers of rank {self._rank}")) from None

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Return an optimizer's state of each parameter that it has any for, a tied one under all of its names."""
        sharded = self._sharded()
        named = self._names.all_seen(self._module.named_parameters(remove_duplicate=False))
        return {
            name: dict(self._parts(name, optimizer.state[parameter], parameter, sharded.get(id(parameter))))
            for name, parameter in named
            if parameter in optimizer.state
        }

    def _parts(
        self, name: str, state: Mapping[str, Any], parameter: Tensor, experts: Experts | None
    ) -> Iterator[tuple[str, Any]]:
        for key, value in state.items():
            if experts is None or not isinstance(value, Tensor) or value.numel() == 1:
                yield key, value
                continue
            if value.shape[:1] != parameter.shape[:1] or not _broadcasts(value.shape, parameter.shape):
                raise PipelineError(
                    f"the optimizer's state {key!r} of {name} has the shape {tuple(value.shape)}, but this rank's "
                    f"share of the parameter {tuple(parameter.shape)}, so which part of the whole it is is unknown"
                )
            yield key, _whole(value, experts, self._mesh)

    def _sharded(self) -> dict[int, Experts]:
        """Return the experts that a parameter belongs to, by its id, if other ranks hold others."""
        return {
            id(parameter): experts for experts in sharded_experts(self._module) for parameter in experts.parameters()
        }


def _whole(part: Tensor, experts: Experts, mesh: DeviceMesh) -> DTensor:
    """Return this rank's part of a tensor as a part of the whole."""
    shape = torch.Size((experts.total, *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh["ep"], [Shard(0)], run_check=False, shape=shape, stride=stride)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return whether sizes are those of another shape, or 1."""
    return len(shape) == len(to) and all(size in (1, other) for size, other in zip(shape, to, strict=True))


def _own_part(name: str, value: Tensor, experts: Experts, parameter: Tensor) -> Tensor:
    """Return this rank's experts from a tensor of all of them, or from the DTensor that `state_dict` returns."""
    if value.shape[:1] != (experts.total,):
        raise PipelineError(
            f"{name} has the shape {tuple(value.shape)}, but there are {experts.total} experts; give those of all ranks"
        )
    if not isinstance(value, DTensor):
        return value[experts.first : experts.first + len(parameter)]
    local = value.to_local()
    _, (first, *_) = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(value.placements) != (Shard(0),) or local.shape != parameter.shape or first != experts.first:
        raise PipelineError(
            f"{name} is a DTensor of placements {value.placements} with experts from {first} on, which is not how they "
            f"are shared out here (from {experts.first} on); load it with torch.distributed.checkpoint, or give the "
            "whole tensor"
        )
    return local
