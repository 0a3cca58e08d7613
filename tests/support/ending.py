"""A rank of a group of ours in which one ends: ending.py RANK RANKS MEETING VICTIM HOW OPERATION."""

import os
import signal
import sys
import time
from datetime import timedelta


def main() -> None:
    import torch
    import torch.distributed as dist

    import stretto.onegpu

    rank, ranks, meeting, victim, how, operation = sys.argv[1:]
    dist.init_process_group("onecpu", init_method=f"file://{meeting}", rank=int(rank), world_size=int(ranks))
    dist.barrier()  # the first comes long before the last where processes start slowly
    group = dist.new_group(timeout=timedelta(seconds=3 if how == "stops" else 30))
    dist.barrier()
    others = [other for other in range(int(ranks)) if other != int(rank)]
    print("ready", flush=True)
    try:
        for turn in range(1000):
            if rank == victim and turn == 5:
                match how:
                    case "dies":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "stops":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    case "leaves":
                        sys.exit(3)
            tensor = torch.ones(100_000)
            if operation == "all_reduce":
                dist.all_reduce(tensor, group=group)
            else:
                works = [dist.irecv(torch.empty(100_000), other, group=group) for other in others]
                works += [dist.isend(tensor, other, group=group) for other in others]
                for work in works:
                    work.wait()
            time.sleep(0.01)
    except stretto.onegpu.GroupError as error:
        os.write(1, f"{error}\n".encode())
        os._exit(7)


if __name__ == "__main__":
    main()
