"""Generates over HTTP and takes new weights: python examples/mini_engine --address unix:///PATH [--tp 2]"""

import argparse
import os
import signal
import sys
from pathlib import Path

if not __package__:  # python examples/mini_engine
    sys.path[0] = str(Path(__file__).parent.parent)

import torch

from mini_engine.engine import Engine
from mini_engine.model import CONFIGS
from mini_engine.server import Server
from stretto.ir.errors import WeightsError


def main() -> str:
    parser = argparse.ArgumentParser(prog="mini_engine", description="A small inference engine.")
    parser.add_argument(
        "--address", required=True, help="where it takes new weights; with --tp 2 ADDRESS-0 and ADDRESS-1"
    )
    parser.add_argument("--tp", type=int, choices=(1, 2), default=1, help="ranks")
    parser.add_argument("--http", type=int, default=0, help="port; any free one if 0")
    parser.add_argument("--config", choices=tuple(CONFIGS), default="tiny", help="how large the model is")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but no GPU is found")
    if not 0 <= given.http < 65536:
        parser.error(f"--http is a port (got {given.http})")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = CONFIGS[given.config]
    try:
        with (
            Engine(given.address, config, tp=given.tp, seed=given.seed, device=given.device) as engine,
            Server(engine, port=given.http) as server,
        ):
            print(f"serving {server.url}", flush=True)
            engine.ended.wait()
    except KeyboardInterrupt:
        sys.exit(0)
    except (WeightsError, OSError) as error:
        return f"mini_engine: {error}"
    return "mini_engine: rank 1 has ended"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SystemExit as end:  # at once: gloo's threads do not outlive an interpreter that takes its time
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
