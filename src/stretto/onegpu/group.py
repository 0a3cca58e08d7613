"""A process group whose ranks share one GPU, or only a machine: the interface of `torch.distributed`."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from stretto.execute.gloo import gloo_group
from stretto.onegpu.collectives import Collectives
from stretto.onegpu.engine import Engine
from stretto.onegpu.reduce import validate_op
from stretto.onegpu.rendezvous import meet
from stretto.onegpu.work import CombinedWork, MessageWork, Work
from stretto.onegpu_broker.link_model import SimulatedLink

_ProcessGroup: Any = dist.ProcessGroup
_cuda: Any = torch.cuda
_PARTS = ("messages", "collectives", "reductions")  # each has an order of its own, and so its own channels
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _collective(method: _Method) -> _Method:
    """Count a collective before it can raise: if it raises on one rank only, the ranks notice that they disagree."""

    @wraps(method)
    def counted(self: "OneGpuGroup", *arguments: Any, **options: Any) -> Any:
        self._collectives.turn += 1
        return method(self, *arguments, **options)

    return cast("_Method", counted)


class OneGpuGroup(_ProcessGroup):  # type: ignore[misc]
    """A group whose point-to-point messages are ordered, and rendezvous, for each directed pair of ranks.

    Tags are ignored. Collectives are made of the same messages, on separate channels, and reduce in the order of the
    ranks, so that all ranks get the same bits. CPU tensors go through gloo, or with `host` through shared memory.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, *, host: bool) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""
        address, self._key = meet(store, rank, size)
        self._engine = Engine.get(address)
        seconds = timeout.total_seconds()
        self._members = tuple(self._engine.join(f"{self._key} {part}", rank, size, seconds) for part in _PARTS)
        self._p2p, moving, reducing = self._members
        self._collectives = Collectives(self._engine, rank, size, moving=moving, reducing=reducing)
        self._host = host
        self._gloo: Any = (
            None if host else gloo_group(c10d.PrefixStore(f"gloo {self._key}", store), rank, size, timeout)
        )
        self.share_fate(self)
        if link := os.environ.get("STRETTO_ONEGPU_LINK"):
            self.model_links(SimulatedLink.parse(link))

    def model_links(self, model: SimulatedLink | None) -> None:
        """Make messages take as long as they would on this link; None removes the delay."""
        for member in self._members:
            member.model_links(model)

    def share_fate(self, other: "OneGpuGroup") -> None:
        """Fail as soon as another group does: what this one brings may be made of what that one never brought."""
        for member in self._members:
            member.share_fate(other._key)

    # What torch.distributed expects of any group.

    def getBackendName(self) -> str:  # noqa: N802
        return "onecpu" if self._host else "onegpu"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def check(self) -> None:
        """Raise GroupError if the group has failed."""
        for member in self._members:
            member.check()

    def shutdown(self) -> None:
        if _cuda.is_initialized():  # queued work still reads flags that other groups will use
            _cuda.synchronize()
        self._engine.leave(*(member.name for member in self._members))
        self._collectives.close()

    def abort(self) -> None:
        for member in self._members:
            member.fail(f"rank {self._rank} gave up")

    # Point-to-point messages.

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        if self._is_gloo(tensors):
            return self._gloo.send(tensors, peer, tag)
        member = self._p2p
        return MessageWork(member, [member.send(tensor, peer) for tensor in tensors], tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        if self._is_gloo(tensors):
            return self._gloo.recv(tensors, peer, tag)
        member = self._p2p
        return MessageWork(member, [member.receive(tensor, peer) for tensor in tensors], tensors)

    # Collectives.

    @_collective
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        root = opts.rootRank if opts is not None else 0
        if self._is_gloo(tensors):
            return self._gloo.broadcast(tensors, opts)
        return self._collectives.broadcast(tensors, root)

    @_collective
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if self._is_gloo(tensors):
            return self._gloo.allreduce(tensors, opts)
        return self._collectives.all_reduce(tensors, _op(opts, tensors))

    allreduce_coalesced = allreduce

    @_collective
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        if self._is_gloo(tensors):
            return self._gloo.reduce(tensors, opts)
        return self._collectives.reduce(tensors, opts.rootRank, _op(opts, tensors))

    @_collective
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        if self._is_gloo(inputs):
            return self._gloo.allgather(outputs, inputs, *_optional(opts))
        return self._collectives.all_gather(outputs, inputs)

    @_collective
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        parts = list(output.view(-1).chunk(self._size)) if output.numel() else [output] * self._size
        return _with_result(self.allgather([parts], [input.reshape(-1)], *_optional(opts)), [output])

    @_collective
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Gather several tensors; outputs are by rank here, and then by tensor."""
        if self._is_gloo(inputs):
            return self._gloo.allgather_coalesced(outputs, inputs, *_optional(opts))
        if len(outputs) != self._size:
            raise ValueError(f"an all-gather among {self._size} ranks needs as many outputs (got {len(outputs)})")
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    @_collective
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return CombinedWork(works, outputs)

    @_collective
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        if self._is_gloo(outputs):
            return self._gloo.reduce_scatter(outputs, inputs, *_optional(opts))
        return self._collectives.reduce_scatter(outputs, inputs, _op(opts, outputs))

    @_collective
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        parts = list(input.contiguous().view(-1).chunk(self._size)) if input.numel() else [input] * self._size
        return _with_result(self.reduce_scatter([output.view(-1)], [parts], *_optional(opts)), [output])

    @_collective
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return CombinedWork(works, outputs)

    @_collective
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:  # noqa: ARG002
        if self._is_gloo(outputs):  # gloo has only the form with single tensors
            sizes = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
            received, sent = outputs[0].new_empty(sum(sizes[0])), torch.cat([tensor.reshape(-1) for tensor in inputs])
            self._gloo.alltoall_base(received, sent, *sizes).wait()
            for output, part in zip(outputs, torch.split(received, sizes[0]), strict=True):
                output.copy_(part.view_as(output))
            return CombinedWork([], outputs)
        return self._collectives.all_to_all(outputs, inputs)

    @_collective
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        if self._is_gloo([output]):
            return self._gloo.alltoall_base(output, input, output_sizes, input_sizes, *_optional(opts))
        rows = self._collectives.rows
        return _with_result(self.alltoall(rows(output, output_sizes), rows(input.contiguous(), input_sizes)), [output])

    @_collective
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        if self._is_gloo(inputs):
            return self._gloo.gather(outputs, inputs, opts)
        is_root = self._rank == opts.rootRank
        return self._collectives.gather(outputs[0] if is_root else [], inputs[0], opts.rootRank)

    @_collective
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        if self._is_gloo(outputs):
            return self._gloo.scatter(outputs, inputs, opts)
        is_root = self._rank == opts.rootRank
        return self._collectives.scatter(outputs[0], inputs[0] if is_root else [], opts.rootRank, outputs)

    def barrier(self, opts: Any = None) -> Any:  # noqa: ARG002
        """Synchronize the hosts, not the streams."""
        if self._gloo is not None:
            return self._gloo.barrier()
        return self.allreduce([torch.zeros(1)])

    # The names of the same methods in older releases of PyTorch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _is_gloo(self, tensors: list[Tensor]) -> bool:
        return self._gloo is not None and not tensors[0].is_cuda


def _with_result(work: Any, result: list[Tensor]) -> Any:
    if isinstance(work, Work):
        work._result = result
    return work


def _optional(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _op(opts: Any, tensors: list[Tensor]) -> Any:
    return validate_op(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensors)
