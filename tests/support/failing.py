"""A rank of a pipeline in which one fails: failing.py [RANK RANKS MEETING] VICTIM HOW; the first not under torchrun."""

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
    from stretto.wire import timing

    *world, victim, how = sys.argv[1:]
    if world:
        rank, ranks, meeting = world
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(ranks))
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    timeout = 2.0
    if how == "stops, found soon":
        # With a long timeout, ranks on one machine blame only who is stopped, however loaded it is.
        timing.SILENCE, timeout = 1.5, 20.0

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

    case = Case("one_f_one_b", dist.get_world_size(), 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    layers = [case.modules()[0], *(Trap().double() for _ in range(dist.get_world_size() - 2)), case.modules()[-1]]
    layers = [torch.nn.Sequential(layer, Trap().double()) if k == 0 else layer for k, layer in enumerate(layers)]
    pipe = stretto.Pipeline(layers, plan=case.plan(), loss=case.loss, mesh=mesh, timeout=timeout)
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
