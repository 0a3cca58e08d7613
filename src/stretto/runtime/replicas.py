"""What lives on several devices: it starts equal, gradients are summed, and buffers must not drift apart."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from stretto.ir.errors import PipelineError
from stretto.runtime.groups import Groups
from stretto.runtime.split_backward import gradient_dtype

Reduce = Callable[[Tensor, dist.ProcessGroup, Any], None]
"""Reduces a tensor over a group."""

BufferPlace = tuple[nn.Module, str]
"""A module, and the name of a buffer in it."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """What a set of ranks holds together, in the same order on each."""

    group: dist.ProcessGroup
    parameters: dict[str, nn.Parameter]
    places: dict[str, BufferPlace]
    """Where the parameters are."""
    buffers: dict[str, BufferPlace]
    sparse: set[str]
    """Parameters whose gradient may be sparse, on any of the ranks."""


class Replicas:
    """What this rank holds that others hold too, by the set of ranks that do."""

    def __init__(
        self,
        groups: Groups,
        holders: Mapping[str, tuple[int, ...]],
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, BufferPlace],
        buffers: Mapping[str, BufferPlace],
        sets: Iterable[tuple[int, ...]],
        *,
        sparse: Callable[[nn.Parameter], bool],
    ) -> None:
        """`holders` says which ranks hold each parameter and buffer, by names that all ranks agree on, as they do on
        the sets of ranks that hold anything together.
        """
        self._shared: list[_Shared] = []
        self._watched = False  # whether a step has shown which buffers change
        for ranks in sorted(sets):
            made = groups.make(ranks)
            if made is not None:
                here = sorted(name for name, of in holders.items() if of == ranks)
                mine = {name: parameters[name] for name in here if name in parameters}
                maybe = {name for name, parameter in mine.items() if sparse(parameter)}
                kept = {name: buffers[name] for name in here if name in buffers}
                at = {name: places[name] for name in mine}
                self._shared.append(_Shared(made, mine, at, kept, maybe))

    def start_equal(self, device: torch.device) -> None:
        for shared in self._shared:
            source = dist.get_global_rank(shared.group, 0)
            flags = torch.tensor([name in shared.sparse for name in shared.parameters], device=device).int()
            if len(flags):
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=shared.group)
            shared.sparse.update(name for name, flag in zip(shared.parameters, flags.tolist(), strict=True) if flag)
            for parameter in shared.parameters.values():
                _broadcast(parameter.data, source, shared.group)
            for module, key in shared.buffers.values():
                buffer = module._buffers[key]
                assert buffer is not None
                copy = buffer.clone(memory_format=torch.contiguous_format)
                _broadcast(copy, source, shared.group)
                if not torch.equal(copy, buffer):  # which may be one number, expanded: then it is replaced
                    module._buffers[key] = copy

    def wrong(self, device: torch.device) -> str | None:
        """Why what is here cannot be held by several ranks; all of them ask together."""
        found = self.statistics()
        for shared in self._shared:
            trained = torch.tensor([p.requires_grad for p in shared.parameters.values()], device=device).int()
            some, all_of = trained.clone(), trained.clone()
            if len(trained):
                dist.all_reduce(some, op=dist.ReduceOp.MAX, group=shared.group)
                dist.all_reduce(all_of, op=dist.ReduceOp.MIN, group=shared.group)
            for name, one, every in zip(shared.parameters, some.tolist(), all_of.tolist(), strict=True):
                if one != every:
                    found = found or f"{name} is frozen on some ranks that hold it, and trained on others"
        return found

    def statistics(self) -> str | None:
        """What is wrong if a layer keeps running statistics: each copy of its stage would see half of the
        microbatches.
        """
        for shared in self._shared:
            for name, parameter in shared.parameters.items():
                if isinstance(parameter, UninitializedParameter):
                    return f"{name} is made by its layer's first forward, which several devices run; run it before"
                if getattr(shared.places[name][0], "max_norm", None) is not None:
                    return f"{name} is changed by forwards (max_norm), and several devices hold it"
            for name, (module, _) in shared.buffers.items():
                if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                    layer = name.rpartition(".")[0]
                    return (
                        f"{layer} keeps running statistics, and its stage lives on two devices, each of which would "
                        "count half of the microbatches; use a plan with one copy (dualpipev), or put it in eval mode"
                    )
        return None

    def watch_buffers(self) -> Callable[[], None]:
        """Refuse running statistics; the function that is returned raises if a forward has changed a buffer since."""
        if (wrong := self.statistics()) is not None:
            raise PipelineError(wrong)
        for shared in self._shared:
            for name, (module, key) in shared.places.items():
                if module._parameters.get(key) is not shared.parameters[name]:
                    raise PipelineError(
                        f"the parameter {name} was replaced after the pipeline was made, and others hold it too; "
                        "make the pipeline anew"
                    )
        before = {}
        for shared in self._shared:
            for name, (module, key) in shared.buffers.items():
                buffer = module._buffers.get(key)
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    copy = None if self._watched else buffer.clone()
                    before[name] = module, key, buffer, buffer._version, copy
        self._watched = True

        def check() -> None:
            for name, (module, key, buffer, version, copy) in before.items():
                changed = module._buffers.get(key) is not buffer or buffer._version != version
                if changed or (copy is not None and not torch.equal(copy, buffer)):  # without a new version, that is
                    raise PipelineError(
                        f"the buffer {name} changed in a forward, and its stage lives on two devices, whose copies "
                        "would drift apart; use a plan that keeps one copy (dualpipev)"
                    )

        return check

    def sum_gradients(self, reduce: Reduce) -> None:
        for shared in self._shared:
            trained = {name: parameter for name, parameter in shared.parameters.items() if parameter.requires_grad}
            for name in sorted(shared.sparse & trained.keys()):
                _sum_sparse(trained.pop(name), shared.group, reduce)
            for parameter in trained.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            grads = [parameter.grad for parameter in trained.values() if parameter.grad is not None]
            for dtype in sorted({str(grad.dtype) for grad in grads}):
                _sum([grad for grad in grads if str(grad.dtype) == dtype], shared.group, reduce)


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Of any type, complex and bool too."""
    if tensor.numel():
        whole = tensor.contiguous()
        dist.broadcast(whole.reshape(-1).view(torch.uint8), source, group=group)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def _sum(grads: list[Tensor], group: dist.ProcessGroup, reduce: Reduce) -> None:
    """All in one message."""
    flat = torch.cat([_real(grad).reshape(-1) for grad in grads])
    reduce(flat, group, dist.ReduceOp.SUM)
    for grad, part in zip(grads, torch.split(flat, [_real(grad).numel() for grad in grads]), strict=True):
        _real(grad).copy_(part.view_as(_real(grad)))


def _real(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _sum_sparse(parameter: nn.Parameter, group: dist.ProcessGroup, reduce: Reduce) -> None:
    """Sum gradients that are sparse on some ranks. As in autograd, the sum is sparse if all are."""
    grad = parameter.grad
    plain = torch.tensor([grad is not None and not grad.is_sparse], device=parameter.device).int()
    reduce(plain, group, dist.ReduceOp.MAX)
    if plain.item():
        parameter.grad = torch.zeros_like(parameter) if grad is None else grad.to_dense()
        _sum([parameter.grad], group, reduce)
        return
    mine = torch.zeros_like(parameter).to_sparse(1) if grad is None else grad.coalesce()
    indices, values = mine.indices(), mine.values()
    counts = torch.zeros(group.size(), dtype=torch.int64, device=parameter.device)
    counts[group.rank()] = values.shape[0]
    reduce(counts, group, dist.ReduceOp.SUM)
    most = int(counts.max())
    all_indices = indices.new_zeros(group.size(), indices.shape[0], most)
    all_values = values.new_zeros(group.size(), most, *values.shape[1:])
    all_indices[group.rank(), :, : indices.shape[1]] = indices
    all_values[group.rank(), : values.shape[0]] = values
    if most:
        reduce(all_indices, group, dist.ReduceOp.SUM)
        reduce(_real(all_values), group, dist.ReduceOp.SUM)
    parts = [(all_indices[k, :, :count], all_values[k, :count]) for k, count in enumerate(counts.tolist())]
    joined = torch.cat([part for part, _ in parts], 1), torch.cat([part for _, part in parts])
    parameter.grad = torch.sparse_coo_tensor(*joined, parameter.shape, check_invariants=False).coalesce()
