"""All that is shown on one GPU, part after part, each with a deadline: python benchmarks/onegpu/run.py [PART …]"""

import argparse
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
RUN = [sys.executable, "-m", "stretto", "onegpu", "run"]
SANITIZER = ["compute-sanitizer", "--target-processes", "all"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
MESSAGES, PROVE, BF16, LIMITS = (str(HERE / f"{name}.py") for name in ("messages", "prove", "bf16", "limits"))
SCHEDULES = ("1F1B", "interleaved", "interleaved overlapped", "ZB-V", "DualPipe", "DualPipeV")
KINDS = ("cast", "cast, W of 2 together", "cast, W of 4 together", "parameter", "float32")
PARTS: dict[str, tuple[list[str], int]] = {
    "messages-2": ([*RUN, "-d", "2", MESSAGES], 60),
    "messages-4": ([*RUN, "-d", "4", MESSAGES], 60),
    "messages-network": ([*RUN, "-d", "2", "--link", "network", MESSAGES], 90),
    "numerics-4": ([*RUN, "-d", "4", PROVE, "numerics"], 90),
    "numerics-8": ([*RUN, "-d", "8", PROVE, "numerics"], 120),
    "bitwise-4": ([*RUN, "-d", "4", PROVE, "bitwise"], 60),
    "compare-4": ([*RUN, "-d", "4", PROVE, "compare"], 60),
    "memory-4": ([*RUN, "-d", "4", PROVE, "memory"], 60),
    "overlap-4": ([*RUN, "-d", "4", PROVE, "overlap"], 60),
    "kill-4": ([*RUN, "-d", "4", PROVE, "kill"], 60),
    "mappings-4": ([*RUN, "-d", "4", "--link", "50:10", str(HERE / "mappings.py")], 120),
    "sanitizer-2": ([*SANITIZER, *TORCHRUN, PROVE, "small"], 240),
    "limits-4": ([*RUN, "-d", "4", LIMITS], 180),
}
for name in SCHEDULES:  # each in processes of its own
    for case in (*(f"ours, {name}, {kind}" for kind in KINDS), f"peer, {name}"):
        if case != "peer, interleaved overlapped":
            PARTS[f"bf16: {case}"] = ([*RUN, "-d", "4", BF16, "--only", case], 60)
    both = ["--only", f"ours, {name}, cast", "--only", f"peer, {name}"]
    PARTS[f"hosts: {name}"] = ([*RUN, "-d", "4", BF16, "16", *both], 60)  # so few tokens that only hosts take time
    compiled = [*both, "--only", f"ours, {name}, parameter"]
    PARTS[f"compiled: {name}"] = ([*RUN, "-d", "4", BF16, "--compile", *compiled], 180)
_NOISE = ("E1", "W1", "[W", "*****")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", help=f"those to run, or how they begin; all if none is named: {list(PARTS)}"
    )
    wanted = tuple(parser.parse_args().parts)
    print(f"{date.today()}")
    for name in [part for part in PARTS if not wanted or part.startswith(wanted)]:
        command, seconds = PARTS[name]
        print(f"\n== {name}", flush=True)
        if shutil.which(command[0]) is None:
            print(f"{command[0]} is not installed")
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            text = done.stdout if done.returncode == 0 else done.stdout + done.stderr[-2000:]
        except subprocess.TimeoutExpired as late:
            text = f"{(late.stdout or b'').decode()}\nnot done after {seconds} s"
        print("\n".join(line for line in text.splitlines() if not line.startswith(_NOISE)), flush=True)


if __name__ == "__main__":
    main()
