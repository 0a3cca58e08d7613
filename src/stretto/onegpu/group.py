"""A process group whose ranks share one GPU, or only a machine: `torch.distributed` on top of sends and receives."""

import os
import uuid
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from stretto.ir.errors import named
from stretto.onegpu import memory
from stretto.onegpu.engine import Engine, Member, Message
from stretto.onegpu.reduce import demand, reduced
from stretto.onegpu.work import All, InThread, Moves, OnStream, Server, Work, settle, updating
from stretto.onegpu_broker.link_model import SimulatedLink

_ProcessGroup: Any = dist.ProcessGroup
_cuda: Any = torch.cuda
_PARTS = ("messages", "collectives", "reductions")  # each with channels of its own, since each has its own order
_Method = TypeVar("_Method", bound=Callable[..., Any])
_SMALL = 65536  # elements up to which an all-reduce is an all-gather and a sum


def _collective(method: _Method) -> _Method:
    """Count a collective before anything can be wrong with it: ranks of which one was refused it notice."""

    @wraps(method)
    def counted(self: "OneGpuGroup", *arguments: Any, **options: Any) -> Any:
        self._turn += 1
        return method(self, *arguments, **options)

    return cast("_Method", counted)


class OneGpuGroup(_ProcessGroup):  # type: ignore[misc]
    """Point-to-point messages are in order, and rendezvous, for each directed pair of ranks; tags are not looked at.

    Collectives are made of the same messages, on channels of their own, and reduce in the order of the ranks, so that
    all ranks get the same bits. Tensors of the CPU are left to gloo, or with `host` moved through shared memory.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, *, host: bool) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, ""
        self._seconds = timeout.total_seconds()
        address, self._key = _meet(store, rank, size)
        self._engine = Engine.get(address)
        self._members = tuple(self._engine.join(f"{self._key} {part}", rank, size, self._seconds) for part in _PARTS)
        self._host = host
        self._gloo: Any = None if host else _gloo(c10d.PrefixStore(f"gloo {self._key}", store), rank, size, timeout)
        if link := os.environ.get("STRETTO_ONEGPU_LINK"):
            self.model_links(SimulatedLink.parse(link))
        self._turn = 0  # collectives that were begun
        self._stream: Any = None
        self._held: deque[tuple[Any, object]] = deque()
        self._server: Server | None = None

    def model_links(self, model: SimulatedLink | None) -> None:
        """Let messages take the time that they would on such links."""
        for member in self._members:
            member.model_links(model)

    # What torch.distributed asks of any group.

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
        """Raise if the group cannot go on."""
        for member in self._members:
            member.check()

    def shutdown(self) -> None:
        if _cuda.is_initialized():  # what is queued still looks at flags that others will use
            _cuda.synchronize()
        for part in _PARTS:
            self._engine.leave(f"{self._key} {part}")
        if self._server is not None:
            self._engine.enders.pop(self._server.end, None)
            self._server.end()

    def abort(self) -> None:
        for member in self._members:
            member.fail(f"rank {self._rank} gave up")

    # Messages between two.

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        if self._is_gloo(tensors):
            return self._gloo.send(tensors, peer, tag)
        member = self._members[0]
        return Moves(member, [member.send(tensor, peer) for tensor in tensors], tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        if self._is_gloo(tensors):
            return self._gloo.recv(tensors, peer, tag)
        member = self._members[0]
        return Moves(member, [member.receive(tensor, peer) for tensor in tensors], tensors)

    # Collectives.

    @_collective
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        root = opts.rootRank if opts is not None else 0
        if self._is_gloo(tensors):
            return self._gloo.broadcast(tensors, opts)

        if self._rank == root:
            return self._move([(peer, tensor) for tensor in tensors for peer in self._peers()], [], tensors)
        return self._move([], [(root, tensor) for tensor in tensors], tensors)

    @_collective
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if self._is_gloo(tensors):
            return self._gloo.allreduce(tensors, opts)
        op = _op(opts, tensors)

        def run() -> None:
            for tensor in tensors:
                self._all_reduce(tensor, op)

        return self._begin(run, tensors)

    allreduce_coalesced = allreduce

    @_collective
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        if self._is_gloo(tensors):
            return self._gloo.reduce(tensors, opts)
        op = _op(opts, tensors)

        def run() -> None:
            for tensor in tensors:
                whole = memory.plain(tensor)
                if self._rank == opts.rootRank:
                    parts = self._rooms(whole)
                    self._exchange({}, {peer: parts[peer] for peer in self._peers()})
                    parts[self._rank] = whole
                    tensor.copy_(reduced(parts, op).view_as(tensor))
                else:
                    self._exchange({opts.rootRank: whole}, {})

        return self._begin(run, tensors)

    @_collective
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        if self._is_gloo(inputs):
            return self._gloo.allgather(outputs, inputs, *_given(opts))

        whole = [memory.plain(mine) for mine in inputs]
        for rooms, mine in zip(outputs, whole, strict=True):
            self._demand_parts(rooms, mine)
            for room in rooms:  # this rank's own too, so that all ranks are refused alike
                memory.demand_target(room)
        for rooms, mine in zip(outputs, whole, strict=True):
            rooms[self._rank].copy_(mine.view_as(rooms[self._rank]))
        return self._move(
            [(peer, mine) for mine in whole for peer in self._peers()],
            [(peer, rooms[peer]) for rooms in outputs for peer in self._peers()],
            [room for rooms in outputs for room in rooms],
        )

    @_collective
    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        rooms = list(output.view(-1).chunk(self._size)) if output.numel() else [output] * self._size
        return self._single(self.allgather([rooms], [given.reshape(-1)], *_given(opts)), [output])

    @_collective
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Outputs are by rank here, and then by tensor."""
        if self._is_gloo(inputs):
            return self._gloo.allgather_coalesced(outputs, inputs, *_given(opts))
        if len(outputs) != self._size:
            raise ValueError(f"an all-gather among {self._size} ranks needs as many outputs (got {len(outputs)})")
        return self.allgather([list(rooms) for rooms in zip(*outputs, strict=True)], inputs, opts)

    @_collective
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.all_gather_single(output, given, opts) for output, given in zip(outputs, inputs, strict=True)]
        return All(works, outputs)

    @_collective
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        if self._is_gloo(outputs):
            return self._gloo.reduce_scatter(outputs, inputs, *_given(opts))
        op = _op(opts, outputs)
        for output, parts in zip(outputs, inputs, strict=True):
            self._demand_parts(parts, output)

        def run() -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                rooms = self._rooms(output)
                self._exchange(
                    {peer: parts[peer] for peer in self._peers()}, {peer: rooms[peer] for peer in self._peers()}
                )
                rooms[self._rank] = parts[self._rank]
                output.copy_(reduced(rooms, op).view_as(output))

        return self._begin(run, outputs)

    @_collective
    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        parts = list(given.contiguous().view(-1).chunk(self._size)) if given.numel() else [given] * self._size
        return self._single(self.reduce_scatter([output.view(-1)], [parts], *_given(opts)), [output])

    @_collective
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.reduce_scatter_single(output, given, opts) for output, given in zip(outputs, inputs, strict=True)]
        return All(works, outputs)

    @_collective
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:  # noqa: ARG002
        if self._is_gloo(outputs):  # which has only the other form
            sizes = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
            flat, given = outputs[0].new_empty(sum(sizes[0])), torch.cat([tensor.reshape(-1) for tensor in inputs])
            self._gloo.alltoall_base(flat, given, *sizes).wait()
            for output, part in zip(outputs, torch.split(flat, sizes[0]), strict=True):
                output.copy_(part.view_as(output))
            return All([], outputs)

        self._demand_parts(outputs)
        self._demand_parts(inputs)
        outputs[self._rank].copy_(inputs[self._rank])
        peers = self._peers()
        return self._move([(to, inputs[to]) for to in peers], [(other, outputs[other]) for other in peers], outputs)

    @_collective
    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        if self._is_gloo([output]):
            return self._gloo.alltoall_base(output, given, output_sizes, input_sizes, *_given(opts))
        outputs, inputs = self._rows(output, output_sizes), self._rows(given.contiguous(), input_sizes)
        return self._single(self.alltoall(outputs, inputs), [output])

    @_collective
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        if self._is_gloo(inputs):
            return self._gloo.gather(outputs, inputs, opts)

        if self._rank != opts.rootRank:
            return self._move([(opts.rootRank, inputs[0])], [], [])
        self._demand_parts(outputs[0], inputs[0])
        outputs[0][self._rank].copy_(inputs[0])
        return self._move([], [(peer, outputs[0][peer]) for peer in self._peers()], outputs[0])

    @_collective
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        if self._is_gloo(outputs):
            return self._gloo.scatter(outputs, inputs, opts)

        if self._rank != opts.rootRank:
            return self._move([], [(opts.rootRank, outputs[0])], outputs)
        self._demand_parts(inputs[0], outputs[0])
        outputs[0].copy_(inputs[0][self._rank])
        return self._move([(peer, inputs[0][peer]) for peer in self._peers()], [], outputs)

    def barrier(self, opts: Any = None) -> Any:  # noqa: ARG002
        """Of the hosts; what streams are at does not matter."""
        if self._gloo is not None:
            return self._gloo.barrier()
        return self.allreduce([torch.zeros(1)])

    # Under these names older releases of PyTorch ask for the same.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _is_gloo(self, tensors: list[Tensor]) -> bool:
        return self._gloo is not None and not tensors[0].is_cuda

    def _peers(self) -> list[int]:
        """The others, the next one first, so that not all begin with the same."""
        return [(self._rank + k) % self._size for k in range(1, self._size)]

    def _rooms(self, like: Tensor) -> list[Tensor]:
        """A room for each rank's."""
        made = like.new_empty((self._size, like.numel()))
        return list(made)

    def _rows(self, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        if sizes:
            return list(torch.split(tensor, sizes))
        if len(tensor) % self._size:
            raise ValueError(f"{len(tensor)} rows cannot be shared evenly among {self._size} ranks")
        return list(tensor.chunk(self._size)) if len(tensor) else [tensor] * self._size

    def _move(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], result: list[Tensor]) -> Work:
        """A collective that only moves: it begins now, and is waited for when it is waited for."""
        member = self._members[1]
        member.turn = self._turn
        return Moves(member, self._post(member, sends, receives), result)

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        """Send and receive, and go no further until all have."""
        member = self._members[2]
        settle(member, self._post(member, list(sends.items()), list(receives.items())))

    def _post(
        self, member: Member, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]
    ) -> list[Message]:
        """All of a collective's messages or none; if only some can be, the group fails."""
        for _, tensor in receives:
            memory.demand_target(tensor)
        for _, tensor in sends:
            memory.demand_source(tensor)
        member.check()
        try:
            moves = [member.receive(tensor, peer) for peer, tensor in receives]
            return moves + [member.send(tensor, peer) for peer, tensor in sends]
        except BaseException as error:
            member.fail(f"rank {self._rank} failed within collective {self._turn}: {named(error)}")
            raise

    def _demand_parts(self, parts: list[Tensor], like: Tensor | None = None) -> None:
        """Raise unless there is one for each rank, of as many bytes as this one has."""
        if len(parts) != self._size:
            raise ValueError(f"a collective of {self._size} ranks needs a tensor for each (got {len(parts)})")
        for part in parts:
            if like is not None and (part.numel(), part.dtype) != (like.numel(), like.dtype):
                raise ValueError(
                    f"the tensors of a collective must be alike (got {part.numel()} of {part.dtype} "
                    f"and {like.numel()} of {like.dtype})"
                )

    def _all_gather(self, rooms: list[Tensor], mine: Tensor) -> None:
        mine = memory.plain(mine)
        self._exchange(dict.fromkeys(self._peers(), mine), {peer: rooms[peer] for peer in self._peers()})
        rooms[self._rank].copy_(mine.view_as(rooms[self._rank]))

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        """Small ones are gathered by all and reduced by all; of large ones each rank reduces a part."""
        flat = memory.plain(tensor).view(-1)
        if flat.numel() <= _SMALL:
            parts = self._rooms(flat)
            self._all_gather(parts, flat)
            tensor.copy_(reduced(parts, op).view_as(tensor))
            return
        shares = list(flat.tensor_split(self._size))
        mine = shares[self._rank]
        rooms = self._rooms(mine)
        self._exchange({peer: shares[peer] for peer in self._peers()}, {peer: rooms[peer] for peer in self._peers()})
        rooms[self._rank] = mine
        mine.copy_(reduced(rooms, op))
        self._exchange(dict.fromkeys(self._peers(), mine), {peer: shares[peer] for peer in self._peers()})
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def _begin(self, run: Callable[[], None], result: list[Tensor]) -> Work:
        """Run a collective that reduces: on the group's stream, behind what is on the current one, or in a thread."""
        member, turn, like = self._members[2], self._turn, result[0]
        member.check()
        for tensor in result:
            memory.demand_source(tensor)

        def run_whole() -> None:
            member.turn = turn
            try:
                with updating(result):
                    run()
            except BaseException as error:
                member.fail(f"rank {self._rank} failed within collective {turn}: {named(error)}")
                raise

        if not like.is_cuda:
            if self._server is None:
                self._server = Server()
                self._engine.enders[self._server.end] = None
            work = InThread(run_whole, result)
            self._server.put(work)
            return work
        with torch.cuda.device(like.device):
            if self._stream is None:
                self._stream = _cuda.Stream(priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run_whole()
                event = _cuda.Event()
                event.record()
            self._held.append((event, run))  # with all that it uses, until the device has ended it
            while self._held[0][0].query() and len(self._held) > 1:
                self._held.popleft()
        return OnStream(member, event, result)

    def _single(self, work: Any, result: list[Tensor]) -> Any:
        if isinstance(work, Work):
            work._result = result
        return work


def _given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _op(opts: Any, tensors: list[Tensor]) -> Any:
    return demand(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensors)


def _meet(store: c10d.Store, rank: int, size: int) -> tuple[str, str]:
    """The address of a broker and a key of this group's own, though the store may have served groups before."""
    if rank > 0:
        address, key = store.get(f"broker {rank} {store.add(f'asked {rank}', 1)}").decode().split()
        return address, key
    address, key = Engine.any_address(), uuid.uuid4().hex
    for peer in range(1, size):
        asked, answered = store.add(f"asked {peer}", 0), store.add(f"answered {peer}", 0)
        number = answered if asked < answered else max(asked, answered + 1)  # what nobody has asked for is replaced
        store.set(f"broker {peer} {number}", f"{address} {key}")
        store.add(f"answered {peer}", number - answered)
    return address, key


def _gloo(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    made = dist.ProcessGroup(store, rank, size)
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return made
