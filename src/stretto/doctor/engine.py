"""The process that `stretto doctor` pushes weights into."""

import sys

import torch

from stretto.doctor.rank import weights
from stretto.weights.receive.receiver import Receiver


def main() -> None:
    address, device = sys.argv[1:]
    live = weights(device, 0.0)
    receiver = Receiver(address, into=live).start()
    print("ready", flush=True)
    for line in sys.stdin:  # ends when the parent process does
        expected = weights(device, float(line))
        print("same" if all(torch.equal(live[name], expected[name]) for name in expected) else "different", flush=True)
    receiver.close()


if __name__ == "__main__":
    main()
