"""How fast sums are found, on the host and on a GPU if there is one: python benchmarks/weights/sums.py [MiB]"""

import sys
import time
from collections.abc import Callable

import torch

from stretto.execute.host_memory import threads
from stretto.weights.checksums import by_floats, digest_of, matrix


def best(act: Callable[[], object], times: int = 10) -> float:
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        act()
        found.append(time.perf_counter() - begun)
    return min(found)


def main() -> None:
    count = int(sys.argv[1] if len(sys.argv) > 1 else 512) << 20
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with threads() as pool:
        for device in devices:
            here = data.to(device)
            digest_of(here, pool)
            seconds = best(lambda: digest_of(here, pool))  # noqa: B023
            print(f"{device}: {1e3 * seconds:.2f} ms, {count / seconds / 1e9:.1f} GB/s", flush=True)
        one = torch.get_num_threads()
        torch.set_num_threads(1)
        seconds = best(lambda: digest_of(data, pool))
        print(f"cpu, one thread for each of our own: {count / seconds / 1e9:.1f} GB/s", flush=True)
        torch.set_num_threads(one)
        rows = data[: 64 << 20].view(torch.int8).view(-1, len(matrix(data.device)))
        seconds = best(lambda: by_floats(rows), 3)
        print(f"cpu, in floating point: {rows.numel() / seconds / 1e9:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
