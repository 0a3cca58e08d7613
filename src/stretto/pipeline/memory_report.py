"""What a dry run reports: what the forwards of each stage save, and how much memory a step takes on each device."""

from dataclasses import dataclass

import msgspec

from stretto.costs import Costs, Link
from stretto.ir.errors import PipelineError
from stretto.ir.tables import table_text
from stretto.ir.units import bytes_text
from stretto.memory import Memory


@dataclass(frozen=True, slots=True)
class SiteMemory:
    """The bytes that a pass of a stage saves at the sites of one name, in all layers of the stage."""

    label: str
    """A phase, such as "attn", or a module within it, such as "mlp.experts"; "loss" for the loss."""
    kept: int
    """What stays on the device."""
    recomputed: int
    """What is dropped after the forward, and computed again in the backward."""
    offloaded: int
    """What leaves for host memory."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The bytes of one microbatch in a stage. What several tensors or sites share counts once."""

    stage: int
    sites: tuple[SiteMemory, ...]
    """In the order in which they run."""
    brought_back: int
    """The most that the recomputation of one site brings back at once."""
    pending: int
    """What is held between the input gradient and the weight gradients: inputs of layers, and gradients of their
    outputs."""
    host: int
    """What the pass takes in host memory."""
    inputs: int
    """The stage's input."""
    input_gradients: int
    """The gradient of that input."""
    may_leave: int
    """What would leave if all were offloaded that the policy names, or all sites if there is no policy, in a program
    that lets passes of this stage leave."""

    @property
    def offloaded(self) -> int:
        """What leaves the device."""
        return sum(site.offloaded for site in self.sites)

    @property
    def activations(self) -> int:
        """What is held at the end of the forward, before anything is offloaded."""
        return sum(site.kept + site.offloaded for site in self.sites)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The bytes that a step takes on the device of one rank, at its peak."""

    rank: int
    weights: int
    """Parameters and module buffers."""
    gradients: int
    """The sums of gradients. Copies of another dtype (`.grad`) are made when no activations are left, and count only as
    far as they are larger than those."""
    activations: int
    """The most that is held for passes at a time, in the order in which tasks are issued: what they keep, what a site
    brings back, gradients on their way, and what waits for weight gradients."""
    transient: int
    """What of that passes do not hold between their forward and their backward: what a site brings back, and gradients
    on their way."""
    buffers: int
    """Receive buffers."""
    host: int
    """Host memory for what is offloaded; not on the device."""
    stages: tuple[int, ...]
    """The stages that the rank runs."""

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.weights + self.gradients + self.activations + self.buffers


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Where the memory of a step goes, by a dry run: the same on every rank. `print(report)` shows two tables."""

    stages: tuple[StageMemory, ...]
    """Of several pipelines, each stage is that of the pipeline in which it saves most."""
    ranks: tuple[RankMemory, ...]
    has_loss: bool
    """Whether there were targets, so that the loss is counted."""
    memory: Memory
    """The policy."""

    def costs(self, costs: Costs, *, host: Link | None = None) -> Costs:
        """Return these costs with the bytes that the dry run has counted, for `choose_memory` and `simulate`.

        They are those of passes under the report's policy. `offload_bytes` is all that may leave: all that the policy
        offloads with a `fraction` of 1, or without a policy, what {"*": "offload"} would. `parameter_bytes` is the rest
        of what a device holds: weights, gradients, receive buffers, and `RankMemory.transient`. `host` is the link to
        host memory, if the costs do not have it.
        """
        if not isinstance(costs, Costs):
            raise PipelineError(
                "costs() adds bytes to costs with times, such as stretto.fit(timeline) returns (only rank 0 has a "
                f"timeline); got a {type(costs).__name__}"
            )
        if not self.has_loss:
            raise PipelineError("the dry run had no targets, so its bytes leave out the loss; run it with targets")
        return msgspec.structs.replace(
            costs,
            activation_bytes=tuple(float(stage.activations) for stage in self.stages),
            offload_bytes=tuple(float(stage.may_leave) for stage in self.stages),
            recompute_bytes=None,
            pending_bytes=tuple(float(stage.pending) for stage in self.stages),
            parameter_bytes=tuple(self._fixed(stage.stage) for stage in self.stages),
            host=costs.host if host is None else host,
        )

    def _fixed(self, stage: int) -> float:
        """Return a stage's share of what its devices hold throughout; of several devices, the largest share."""
        shares = []
        for rank in self.ranks:
            if stage in rank.stages:
                shares.append((rank.total - rank.activations + rank.transient) / len(rank.stages))
        return max(shares)

    def __str__(self) -> str:
        saved = [["stage", "site", "kept", "recomputed", "offloaded"]]
        for stage in self.stages:
            for number, site in enumerate(stage.sites):
                sizes = _texts(site.kept, site.recomputed, site.offloaded)
                saved.append(["" if number else str(stage.stage), site.label, *sizes])
        held = [["rank", "weights", "gradients", "activations", "buffers", "sum", "host memory"]]
        for rank in self.ranks:
            sizes = _texts(rank.weights, rank.gradients, rank.activations, rank.buffers, rank.total, rank.host)
            held.append([str(rank.rank), *sizes])
        without = "" if self.has_loss else ", without the loss, since there were no targets"
        first, second = table_text(saved, left=2), table_text(held, left=1)
        if self.memory.names_offload and not any(stage.offloaded for stage in self.stages):
            first += f"\n\nNothing is offloaded: {_why_all_stays(self.memory)}."
        return f"What one microbatch saves{without}:\n{first}\n\nWhat a step takes at its peak:\n{second}"


def _why_all_stays(memory: Memory) -> str:
    """Return the reasons for which a policy may offload nothing."""
    if not memory.offloads:
        return "fraction is 0"
    reasons = ["is held by others anyway (inputs of the step, received messages, parameters)"]
    if memory.min_bytes:
        least = bytes_text(memory.min_bytes)
        reasons.append(f"is smaller than min_bytes ({least}; set min_bytes=0 to try a policy on a small model)")
    if memory.max_in_flight is not None or memory.fraction != 1:
        reasons.append("is more than max_in_flight or fraction allows")
    if memory.keep_layers:
        reasons.append("is in one of the layers that keep_layers names")
    reasons.append("is needed again before it could have left and come back (copy_actions)")
    return f"what the policy names {', '.join(reasons[:-1])}, or {reasons[-1]}"


def _texts(*sizes: int) -> list[str]:
    return [bytes_text(nbytes) if nbytes else "0" for nbytes in sizes]
