"""A process that weights are pushed into."""

import sys

from stretto.doctor.rank import weights
from stretto.weights.receiver import Receiver


def main() -> None:
    address, device = sys.argv[1:]
    receiver = Receiver(address, into=weights(device, 0.0)).start()
    print("ready", flush=True)
    sys.stdin.read()  # until whoever started this ends
    receiver.close()


if __name__ == "__main__":
    main()
