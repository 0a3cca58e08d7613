"""Parameters and buffers that several ranks hold: they start equal, gradients are summed, buffers must not change."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from stretto.execute.groups import all_reduce
from stretto.execute.host_lanes import Work
from stretto.execute.team import Team
from stretto.ir.errors import PipelineError
from stretto.pipeline.agreement import Agreement
from stretto.pipeline.gradient_buffers import Block, Sum
from stretto.pipeline.gradients import Gradients, Message
from stretto.pipeline.ties import Place, description, difference


@dataclass(frozen=True, slots=True)
class Held:
    """The ranks and stages that hold a parameter or buffer."""

    ranks: tuple[int, ...]
    source: int
    """The rank whose values all others start with."""
    stages: tuple[int, ...]
    """The stages that hold it. Gradients of the same stages are summed in one all-reduce."""
    experts: bool = False
    """Whether it belongs to experts of which other ranks hold others. Those have a sum of their own."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """The parameters and buffers that one set of ranks shares, in the same order on each rank."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    parameters: dict[str, nn.Parameter]
    places: dict[str, Place]
    """The module and attribute of each parameter."""
    buffers: dict[str, Place]
    sparse: set[str]
    """Parameters whose gradient may be sparse on any of the ranks."""


class Replicas:
    """The parameters and buffers that this rank shares with others, grouped by set of ranks."""

    def __init__(
        self,
        team: Team,
        held: Mapping[str, Held],
        parameters: Mapping[str, nn.Parameter],
        places: Mapping[str, Place],
        buffers: Mapping[str, Place],
        sets: Iterable[tuple[int, ...]],
        *,
        stages: Collection[int],
        sparse: Callable[[nn.Parameter], bool],
        seen: Callable[[str], str],
    ) -> None:
        """Create the process groups. All ranks call this together.

        `held` maps the name of each parameter and buffer to the ranks that hold it; names and `sets` (the sets of ranks
        that share anything) are the same on all ranks. `stages` are the stages that live on several ranks. `seen`
        returns the name that users see.
        """
        self._shared: list[_Shared] = []
        self._team = team
        self._held, self._stages, self._seen = held, stages, seen
        self._watched = False  # whether the first step has checked which buffers change
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._sets = sorted(sets)
        self._agreement = Agreement(team, self._sets)
        self._late: list[tuple[_Shared, Message]] = []  # sums that must wait until the step has run
        self._begun: list[Block] = []
        self._sent: dict[tuple[int, ...], int] = {}
        for ranks in self._sets:
            group = team.make(ranks)
            if group is not None:
                names = sorted(name for name, holders in held.items() if holders.ranks == ranks)
                own_parameters = {name: parameters[name] for name in names if name in parameters}
                maybe_sparse = {name for name, parameter in own_parameters.items() if sparse(parameter)}
                own_buffers = {name: buffers[name] for name in names if name in buffers}
                own_places = {name: places[name] for name in own_parameters}
                self._shared.append(_Shared(ranks, group, own_parameters, own_places, own_buffers, maybe_sparse))
        self._sums = {
            self._key_of(name): shared for shared in self._shared for name in shared.parameters if name in held
        }

    def validate(self, parameters: Iterable[Tensor]) -> None:
        """Raise PipelineError if a shared parameter is no longer among this rank's parameters."""
        present = {id(parameter) for parameter in parameters}
        for shared in self._shared:
            for name, parameter in shared.parameters.items():
                if id(parameter) not in present:
                    raise PipelineError(_REPLACED.format(self._seen(name)))

    def shared_as(self, parameter: Tensor, stage: int) -> tuple[Message, str] | None:
        """Return the all-reduce that sums a parameter's gradient, and its name there; None if it is not shared."""
        name = self._names.get(id(parameter), "")
        held = self._held.get(name)
        if held is None and stage in self._stages:
            raise PipelineError(
                f"a parameter of shape {tuple(parameter.shape)} was added to stage {stage} after the pipeline was "
                "made, and several devices hold that stage; make the pipeline anew"
            )
        return None if held is None or len(held.ranks) < 2 else ((held.ranks, held.stages), name)

    def unsummed(self, sums: Collection[tuple[tuple[int, ...], bool]]) -> str | None:
        """Return an error text if a shared parameter is in none of the sums of this rank's program, or None."""
        for key, shared in self._sums.items():
            if key not in sums:
                name = next(name for name in shared.parameters if self._key_of(name) == key)
                return f"the program does not sum the gradient of {self._seen(name)}, which several ranks hold"
        return None

    def _key_of(self, name: str) -> tuple[tuple[int, ...], bool]:
        return self._held[name].stages, self._held[name].experts

    def counts_here(self, parameter: Tensor) -> bool:
        """Return whether this rank is the first of those that hold a parameter, which counts it for all of them."""
        held = self._held.get(self._names.get(id(parameter), ""))
        return held is None or held.ranks[0] == self._team.rank

    def is_sparse(self, parameter: Tensor) -> bool:
        """Return whether the parameter's gradient may be sparse on any rank that holds it."""
        return any(self._names.get(id(parameter)) in shared.sparse for shared in self._shared)

    def start_equal(self, device: torch.device) -> None:
        """Broadcast all shared parameters and buffers from their source ranks."""
        for shared in self._shared:
            flags = torch.tensor([name in shared.sparse for name in shared.parameters], device=device).int()
            if len(flags):
                found = self._team.reduced(flags, shared.group, dist.ReduceOp.MAX)
                shared.sparse.update(name for name, flag in zip(shared.parameters, found, strict=True) if flag)
            for name, parameter in shared.parameters.items():
                self._broadcast(parameter.data, name, shared)
            copies = []
            for name, (module, key) in shared.buffers.items():
                buffer = module._buffers[key]
                assert buffer is not None
                copy = buffer.clone(memory_format=torch.contiguous_format)
                self._broadcast(copy, name, shared)
                copies.append((module, key, buffer, copy))
            self._team.catch_up("parameters and buffers of other ranks")
            for module, key, buffer, copy in copies:
                if not torch.equal(copy, buffer):  # replace it: an expanded buffer cannot be written to
                    module._buffers[key] = copy

    def wrong(self, device: torch.device) -> str | None:
        """Return why this rank's layers cannot be shared with other ranks, or None. All ranks call this together."""
        problem = self.unsupported()
        for shared in self._shared:
            names = hashlib.blake2b(" ".join(shared.parameters).encode(), digest_size=7).digest()
            most, least = self._extremes(torch.tensor([int.from_bytes(names)], device=device), shared.group)
            if most != least:
                others = "rank " + " and rank ".join(map(str, shared.ranks))
                return problem or f"{others} hold the same layers, which have other parameters on one than on the other"
            rows = torch.tensor([description(p) for p in shared.parameters.values()], device=device)
            if len(rows):
                for name, one, other in zip(shared.parameters, *self._extremes(rows, shared.group), strict=True):
                    if (how := difference(one, other)) is not None:
                        problem = problem or f"the copies of {self._seen(name)} on several ranks {how}"
        return problem

    def _broadcast(self, tensor: Tensor, name: str, shared: _Shared) -> None:
        """Broadcast a tensor of any dtype, as bytes. Of a DTensor, broadcast the local shard."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.numel():
            whole = tensor.contiguous()
            source = shared.ranks.index(self._held[name].source)
            self._team.broadcast(whole.reshape(-1).view(torch.uint8), source, shared.group)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)

    def _extremes(self, numbers: Tensor, group: dist.ProcessGroup) -> tuple[list[Any], list[Any]]:
        """Return the element-wise maximum and minimum over the ranks."""
        most, least = (self._team.reduced(numbers.clone(), group, op) for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN))
        return most, least

    def unsupported(self) -> str | None:
        """Return why forwards would make the ranks' copies differ, or None.

        Running statistics, for example: each copy of a stage sees only some of the microbatches.
        """
        for shared in self._shared:
            for name, parameter in shared.parameters.items():
                seen = self._seen(name)
                if isinstance(parameter, UninitializedParameter):
                    return f"{seen} is made by its layer's first forward, which several devices run; run it before"
                if getattr(shared.places[name][0], "max_norm", None) is not None:
                    return f"{seen} is changed by forwards (max_norm), and several devices hold it"
            for name, (module, _) in shared.buffers.items():
                if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                    layer = self._seen(name).rpartition(".")[0]
                    return (
                        f"{layer} keeps running statistics, and its stage lives on {len(shared.ranks)} devices, each "
                        f"of which would count its own microbatches only; put it in eval mode, {_ONE_COPY}"
                    )
        return None

    def watch_buffers(self) -> Callable[[], None]:
        """Raise PipelineError for layers that several ranks cannot hold.

        Return a function that raises PipelineError if a forward has changed a buffer since.
        """
        if (wrong := self.unsupported()) is not None:
            raise PipelineError(wrong)
        for shared in self._shared:
            for name, (module, key) in shared.places.items():
                if module._parameters.get(key) is not shared.parameters[name]:
                    raise PipelineError(_REPLACED.format(self._seen(name)))
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
                if changed or (copy is not None and not torch.equal(copy, buffer)):  # changed without a new version
                    raise PipelineError(
                        f"the buffer {self._seen(name)} changed in a forward, and its stage lives on several devices, "
                        f"whose copies would drift apart; make it non-persistent if it is a cache, {_ONE_COPY}"
                    )

        return check

    def begin(self, gradients: Gradients, behind: Callable[[], Collection[int]]) -> None:
        """Begin a step: send the other ranks a checksum of what this rank will sum with them.

        `behind` returns the ids of the leaves on which inputs and targets depend. Their gradients are complete only
        after the step has run, so their sums must wait for that.
        """
        self._late, self._begun = [], []
        if self._shared:
            later = behind()
            for shared in self._shared:
                waits = any(id(parameter) in later for parameter in shared.parameters.values()) if later else False
                self._sent[shared.ranks] = 2 * gradients.digest(shared.ranks) + waits
            self._agreement.send(self._sent)

    def sum_stages(self, stages: tuple[int, ...], *, experts: bool, gradients: Gradients) -> Work | None:
        """Start to sum the gradients that these stages share with other ranks, of experts or of all else.

        Return the work, if any was started.
        """
        shared = self._sums.get((stages, experts))
        if shared is None:  # the stages have no parameters
            return None
        message = (shared.ranks, stages)
        others = self._others(shared)
        if any(number & 1 for number in (self._sent[shared.ranks], *others.values())):
            self._late.append((shared, message))
            return None
        return self._begin(shared, message, gradients)

    def validate_begin(self) -> None:
        """Raise PipelineError if ranks that share parameters do not train the same. Wait for what they sent.

        `sum_stages` does this too; but if ranks exchange tokens, a difference would make one wait for another.
        """
        for shared in self._shared:
            self._others(shared)

    def _others(self, shared: _Shared) -> dict[int, int]:
        """Return what the other ranks of a set have sent, once it is known that they train the same."""
        others = self._agreement.others(shared.ranks)
        if any(number >> 1 != self._sent[shared.ranks] >> 1 for number in others.values()):
            raise PipelineError(
                f"ranks {', '.join(map(str, shared.ranks))} hold the same parameters, but not the same of them are "
                "trained, or not in the same shapes and strides; change parameters alike on all ranks"
            )
        return others

    def _begin(self, shared: _Shared, message: Message, gradients: Gradients) -> "_Sums | None":
        begun: list[tuple[dist.Work, Tensor]] = []
        for block in gradients.blocks(message):
            gradients.collect(sum_.parameter for sum_ in block.sums)  # gradients left by a layer's own backward()
            flat = block.message()
            start = partial(all_reduce, shared.group, flat, dist.ReduceOp.SUM)
            begun.append((self._team.start(start), flat))
            self._begun.append(block)
        for sum_ in gradients.loose(message):
            gradients.collect([sum_.parameter])
            _sum_loose(sum_, shared.group, self._team)
            sum_.is_summed = True
        if self._team.device.type == "cuda":
            for work, flat in begun:
                self._team.settle(work, flat)
            return None
        return _Sums(begun) if begun else None

    def end(self, gradients: Gradients) -> None:
        """Sum the gradients that had to wait, and drop those of parameters that no rank used.

        Call this after the step and the backward behind inputs and targets have run.
        """
        for shared, message in self._late:
            begun = self._begin(shared, message, gradients)
            if begun is not None:
                for work, flat in begun.works:
                    self._team.settle(work, flat)
        doubtful = [block for block in self._begun if block.is_in_doubt]
        if doubtful:
            self._team.catch_up("the sums over ranks")
            for block in doubtful:
                block.settle()

    def close(self) -> None:
        """Close the connections."""
        self._agreement.close()


class _Sums:
    """All-reduces that were started on the host."""

    def __init__(self, works: list[tuple[dist.Work, Tensor]]) -> None:
        self.works = works

    def wait(self) -> None:
        for work, _ in self.works:
            work.wait()


_ONE_COPY = "or use a plan and a mesh that keep one copy (dualpipev instead of dualpipe, neither dp nor ep)"
_REPLACED = "the parameter {} was replaced after the pipeline was made, and others hold it too; make the pipeline anew"


def _sum_loose(sum_: Sum, group: dist.ProcessGroup, team: Team) -> None:
    """Sum gradients that may be sparse on some ranks. As in autograd, the sum is sparse if all of them are."""
    parameter, grad = sum_.parameter, sum_.value
    some, dense = grad is not None, grad is not None and not grad.is_sparse
    flags = torch.tensor([some, dense], device=parameter.device).int()
    any_has_some, any_is_dense = team.reduced(flags, group, dist.ReduceOp.MAX)
    if not any_has_some:
        return
    if any_is_dense:
        whole = torch.zeros_like(parameter, dtype=sum_.dtype) if grad is None else grad if dense else grad.to_dense()
        local = whole.to_local() if isinstance(whole, DTensor) else whole
        flat = local.contiguous()  # strides may differ between ranks, and the sum goes by memory order
        team.all_reduce(_real(flat), group, dist.ReduceOp.SUM)
        if flat is not local:
            local.copy_(flat)
        sum_.value = whole
        return
    sparse = torch.zeros_like(parameter, dtype=sum_.dtype).to_sparse(1) if grad is None else grad.coalesce()
    indices, values = sparse.indices(), sparse.values()
    own = torch.zeros(group.size(), dtype=torch.int64, device=parameter.device)
    own[group.rank()] = values.shape[0]
    counts = team.reduced(own, group, dist.ReduceOp.SUM)
    most = max(counts)
    all_indices = indices.new_zeros(group.size(), indices.shape[0], most)
    all_values = values.new_zeros(group.size(), most, *values.shape[1:])
    all_indices[group.rank(), :, : indices.shape[1]] = indices
    all_values[group.rank(), : values.shape[0]] = values
    if most:
        team.all_reduce(all_indices, group, dist.ReduceOp.SUM)
        team.all_reduce(_real(all_values), group, dist.ReduceOp.SUM)
    parts = [(all_indices[k, :, :count], all_values[k, :count]) for k, count in enumerate(counts)]
    joined = torch.cat([part for part, _ in parts], 1), torch.cat([part for _, part in parts])
    sum_.value = torch.sparse_coo_tensor(*joined, parameter.shape, check_invariants=False).coalesce()


def _real(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad) if grad.is_complex() else grad
