"""A process that weights are pushed into."""

import sys

import torch

from stretto.doctor.rank import weights
from stretto.weights.receive.receiver import Receiver


def main() -> None:
    address, device = sys.argv[1:]
    live = weights(device, 0.0)
    receiver = Receiver(address, into=live).start()
    print("ready", flush=True)
    for line in sys.stdin:  # until whoever started this ends
        wanted = weights(device, float(line))
        print("same" if all(torch.equal(live[name], wanted[name]) for name in wanted) else "different", flush=True)
    receiver.close()


if __name__ == "__main__":
    main()
