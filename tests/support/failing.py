"""A rank of a pipeline in which one fails: failing.py [RANK RANKS MEETING] VICTIM HOW MESH.

The first three are left out under torchrun. The mesh is as in "pp=2,ep=2"; experts are in it if it has ep.
"""

import os
import signal
import sys
import time
from typing import Any


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import stretto
    from models import Block, Case
    from stretto.moe import RoutedExperts
    from stretto.wire import timing

    *world, victim, how, mesh_text = sys.argv[1:]
    if world:
        rank, ranks, meeting = world
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(ranks))
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    dist.barrier()  # the first comes long before the last where processes start slowly
    # With a long timeout, ranks on one machine blame only who is to blame, however loaded it is.
    timeout = 2.0 if how in ("stops", "stalls") else 20.0
    if how == "stops, found soon":
        timing.SILENCE = 1.5

    class Trap(Block):
        runs = 0

        def forward(self, x: Any) -> Any:
            Trap.runs += 1
            if dist.get_rank() == int(victim) and Trap.runs == 6:  # in the second step
                match how:
                    case "raises" | "caught" | "uncaught":
                        raise RuntimeError("out of luck")
                    case "dies":
                        time.sleep(1)  # long enough for its last heartbeat to tell what it was at
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "stops" | "stops, found soon":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    case "stalls":
                        time.sleep(60)
                    case "leaves":
                        sys.exit(3)
            return super().forward(x)

    class Crowd(torch.nn.Module):
        """Experts that every rank sends tokens to."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = RoutedExperts(4, 8, 4).double()

        def forward(self, x: Any) -> Any:
            x_TD = x.reshape(-1, x.shape[-1])
            weights_TK, indices_TK = x_TD[:, :4].sigmoid().topk(2)
            return x + self.experts(x_TD, indices_TK, weights_TK).view_as(x)

    sizes = {name: int(size) for name, size in (part.split("=") for part in mesh_text.split(","))}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    stages = sizes.get("pp", 1)
    case = Case("one_f_one_b", 4, 4)
    embedding, *_, head = case.modules()
    crowd = [Crowd()] if "ep" in sizes else []
    traps = [torch.nn.Sequential(Trap().double(), *crowd) for _ in range(max(1, stages - 1))]
    if len(sizes) == 1:
        layers = [torch.nn.Sequential(embedding, traps[0]), *traps[1:], head]
    else:
        layers = [embedding, *traps, Trap().double(), head]
    plan = stretto.schedules.one_f_one_b(devices=stages, microbatches=4)
    pipe = stretto.Pipeline(layers, plan=plan, loss=case.loss, mesh=mesh, timeout=timeout)
    try:
        for step in range(5):
            if step == 1 and dist.get_rank() == int(victim) and how == "ends":
                sys.exit(0)
            if step == 1 and dist.get_rank() == int(victim) and how == "evaluates":
                pipe.eval_step(*case.batch())
            pipe.step(*case.batch())
            if how == "dies before clipping":
                dist.barrier()  # so that no other rank is still in the step
                if dist.get_rank() == int(victim):
                    os.kill(os.getpid(), signal.SIGKILL)
                pipe.clip_grad_norm_(1.0)
    except (stretto.PipelineError, RuntimeError) as error:
        if how in ("caught", "evaluates"):
            os.write(2, f"{error}\n".encode())
            pipe.close()
            dist.destroy_process_group()
            return
        if how == "uncaught":
            raise
        if not isinstance(error, stretto.PipelineError):
            raise
        os.write(2, f"{type(error).__name__}: {error}\n".encode())  # in one piece
        os._exit(7)  # as a user's program would end, without waiting for groups that can never end
    print("went on", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
