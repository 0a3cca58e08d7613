"""Clips gradients by their norm over all ranks, in which what several ranks hold counts once."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import isinf, isnan
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from stretto.execute.team import Team
from stretto.ir.errors import PipelineError
from stretto.pipeline.agreement import Agreement
from stretto.pipeline.replicas import Replicas
from stretto.pipeline.turns import Turns

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_HALVES = (torch.bfloat16, torch.float16)


class Clipper:
    """Clips the gradients of one pipeline."""

    def __init__(self, team: Team, turns: Turns, agreement: Agreement, replicas: Replicas) -> None:
        """`agreement` covers all ranks."""
        self._team, self._turns, self._agreement, self._replicas = team, turns, agreement, replicas
        self._count = 0

    def clip(
        self,
        named_grads: Iterable[tuple[str, Tensor, Tensor | None]],
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """Clip this rank's gradients, which are given with the names and parameters they belong to; return the norm.

        All ranks call this together. The norm is a float64 if any rank has such a gradient, otherwise a float32.
        """
        grads = [(name, parameter, grad) for name, parameter, grad in named_grads if grad is not None]
        counted = {name: grad for name, parameter, grad in grads if self._replicas.counts_here(parameter)}
        wrong, finite = _wrong(max_norm, norm_type), True
        self._count += 1
        label = f"clipping {self._count}"
        if wrong is None:
            max_norm, norm_type = float(max_norm), float(norm_type)
            label += f" (max_norm={max_norm}, norm_type={norm_type}{', error_if_nonfinite' * bool(error_if_nonfinite)})"
        try:
            with self._turns.guarding(label):
                if wrong is not None:
                    raise wrong
                double = self._agreement.exchange(tuple(range(self._team.size)), int(_is_double(counted.values())))
                norm = norm_of_all(counted, norm_type, self._team)
                if error_if_nonfinite:
                    self._turns.catch_up()
                    finite = bool(norm.isfinite())
                if finite:
                    scale([grad for _, _, grad in grads], max_norm, norm)
        finally:
            self._team.supervisor.answer()
        if not finite:
            raise PipelineError(f"the norm of all gradients is {float(norm)}, so they were not clipped")
        return norm if any(double) else norm.float()


def _wrong(max_norm: Any, norm_type: Any) -> PipelineError | None:
    """Return the error in the arguments of `clip_grad_norm_`, or None."""
    if not isinstance(max_norm, Real) or isnan(max_norm) or max_norm < 0:
        return PipelineError(f"max_norm is a number of at least 0 (got {max_norm!r:.60})")
    if not isinstance(norm_type, Real) or isnan(norm_type) or norm_type <= 0:
        return PipelineError(f"norm_type is a number above 0, or inf (got {norm_type!r:.60})")
    return None


def _is_double(grads: Iterable[Tensor]) -> bool:
    return any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)


@torch.no_grad()
def norm_of_all(grads: Mapping[str, Tensor], norm_type: float, team: Team) -> Tensor:
    """Return the norm of all ranks' gradients in float64, to the bit the same on each of them.

    `grads` are those that count on this rank, by name. All ranks call this together.
    """
    norms = torch.zeros(team.size, dtype=torch.float64, device=team.device)
    norms[team.rank] = _norm(_own_norms(grads, norm_type), norm_type, team.device)
    assert team.everybody is not None
    team.all_reduce(norms, team.everybody, dist.ReduceOp.SUM)  # of one number and zeros, and so exact
    norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm


@torch.no_grad()
def scale(grads: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place, so that their norm is at most `max_norm`. The host does not wait for the norm."""
    if isinf(max_norm):
        return  # infinite gradients would become nan
    factor = (max_norm / (norm + _TINY)).clamp(max=1.0)
    alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for grad in map(_stored, grads):
        if grad.dtype in _HALVES:  # in float32, rounded once
            torch.mul(grad, factor.float().reshape(1), out=grad)
        elif grad.is_complex():
            grad.mul_(factor)
        else:
            alike[grad.dtype].append(grad)
    for dtype, several in alike.items():
        torch._foreach_mul_(several, factor.to(dtype))


def _stored(grad: Tensor) -> Tensor:
    """Return the numbers that a gradient consists of on this rank, as a plain tensor."""
    if isinstance(grad, DTensor):
        grad = grad.to_local()
    return grad._values() if grad.is_sparse else grad


def _own_norms(grads: Mapping[str, Tensor], norm_type: float) -> list[Tensor]:
    """Return norms whose norm is that of these gradients.

    For those of DTensors, all ranks of their mesh must call this.
    """
    plain: list[Tensor] = []
    shards: dict[Any, list[Tensor]] = defaultdict(list)  # by mesh and placements
    for name, grad in grads.items():
        if isinstance(grad, DTensor):
            whole = _without_partial(name, grad)
            shards[whole.device_mesh, whole.placements].append(whole.to_local())
        else:
            plain.append(grad.coalesce().values() if grad.is_sparse else grad)
    norms = _norms(plain, norm_type)
    for (mesh, placements), parts in shards.items():
        stacked = torch.stack([norm.double() for norm in _norms(parts, norm_type)])
        layout = [Replicate() if placement.is_replicate() else Shard(0) for placement in placements]
        norms.append(DTensor.from_local(stacked, mesh, layout, run_check=False).full_tensor())
    return norms


def _without_partial(name: str, grad: DTensor) -> DTensor:
    """Return a gradient whose sum over its mesh has been computed."""
    placements = grad.placements
    for placement in placements:
        if placement.is_partial() and getattr(placement, "reduce_op", "") not in ("sum", "avg"):
            raise PipelineError(f"the gradient of {name} is a DTensor of placement {placement}, which has no norm")
    if not any(placement.is_partial() for placement in placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if placement.is_partial() else placement for placement in placements]
    )


def _norms(tensors: Iterable[Tensor], norm_type: float) -> list[Tensor]:
    """Return the norm of each tensor."""
    alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    norms: list[Tensor] = []
    for tensor in tensors:
        if not tensor.numel():
            norms.append(tensor.new_zeros((), dtype=torch.float64))
        elif tensor.is_complex():
            norms.append(torch.linalg.vector_norm(tensor, norm_type))
        else:
            alike[tensor.dtype].append(tensor)
    for dtype, several in alike.items():
        norms += torch._foreach_norm(several, norm_type, dtype=torch.float32 if dtype in _HALVES else dtype)
    return norms


def _norm(norms: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([each.reshape(-1).double() for each in norms]), norm_type)
    return norm
