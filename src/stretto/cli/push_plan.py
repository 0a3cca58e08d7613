"""`stretto push --dry-run`: how long a push would take in each mode, and its picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.cli.console import DRAWN, number, out, print_table, print_timeline
from stretto.cli.inputs import write_figure
from stretto.ir.errors import WeightsError
from stretto.ir.units import bytes_text
from stretto.program.update import MODES, Mode

if TYPE_CHECKING:
    from stretto.weights.send.choose import Choice


class ModePlan(msgspec.Struct, frozen=True):
    """What a push would take in one mode, as --json prints it."""

    mode: str
    seconds: float
    gb_per_second: float
    buffer_bytes: int


class PushPlan(msgspec.Struct, frozen=True):
    """The plan of a push, as --json prints it. Speeds are measured here; a broadcast counts as twice as fast."""

    version: str
    tensors: int
    bytes: int
    buckets: int
    bucket_bytes: int
    senders: int
    h2d_gb_per_second: float
    reload_gb_per_second: float
    chosen: str
    modes: list[ModePlan]


def device_kind(device: str | None) -> str:
    """Return cpu or cuda: what --device says, or what is there."""
    import torch

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise WeightsError(f"--device is cpu or cuda (got {kind!r:.40})")
    if kind == "cuda" and not torch.cuda.is_available():
        raise WeightsError("--device cuda, but no GPU is found")
    return kind


def predict_push(
    files: Any,
    version: str,
    senders: int,
    *,
    mode: Mode | None,
    device: str | None,
    bucket_bytes: int | None,
    split: bool,
    output: Path | None,
    json: bool,
) -> None:
    """Print the plan of a push, predicted from measured copy speeds."""
    from stretto.weights.ipc_buffers import resolved
    from stretto.weights.layout import lay_out
    from stretto.weights.manifest import Manifest
    from stretto.weights.send.choose import bucket_bytes_for, buffers, choose
    from stretto.weights.send.speeds import copies
    from stretto.weights.send.staging import free_bytes

    if not 1 <= senders <= 4096:
        raise WeightsError(f"--devices is a number of senders from 1 to 4096 (got {senders})")
    manifest = Manifest(version, tuple(tensor.entry for tensor in files.held()))
    manifest.check()
    where = resolved(device_kind(device))
    free = free_bytes(where)
    size = bucket_bytes or bucket_bytes_for(manifest, senders, free, split=split)
    buckets = len(lay_out(manifest, size, split=split))
    speeds = copies(where)

    def predict(mode: Mode, buckets: int) -> "Choice":
        return choose(senders, buckets, size, speeds, free, mode=mode)

    fits = [name for name in MODES if buffers(senders, name) * size <= free]
    choices = [predict(name, buckets) for name in ([mode] if mode is not None else fits or MODES)]
    best = min(choices, key=lambda choice: choice.predicted.makespan)
    if output is not None:
        write_figure(best.predicted, output)
    plan = PushPlan(
        version=version,
        tensors=len(manifest.entries),
        bytes=manifest.nbytes,
        buckets=buckets,
        bucket_bytes=size,
        senders=senders,
        h2d_gb_per_second=speeds.h2d / 1e9,
        reload_gb_per_second=speeds.reload / 1e9,
        chosen=best.mode,
        modes=[
            ModePlan(
                choice.mode,
                choice.predicted.makespan,
                manifest.nbytes / choice.predicted.makespan / 1e9,
                buffers(senders, choice.mode) * size,
            )
            for choice in choices
        ],
    )
    if json:
        out.print(msgspec.json.format(msgspec.json.encode(plan)).decode())
        return
    _print(plan, str(where))
    shown = min(buckets, DRAWN * buckets // len(best.program))
    if output is not None:
        out.print(f"wrote {output}")
    elif shown < min(2, buckets):
        out.print(f"{len(best.program):,} tasks do not fit a terminal; draw them with -o push.svg")
    else:
        if shown < buckets:
            out.print(f"the first {shown} buckets; all of them with -o push.svg:")
        drawn = best if shown == buckets else predict(best.mode, shown)
        print_timeline(drawn.predicted)


def _print(plan: PushPlan, where: str) -> None:
    from stretto.weights.send.report import counted

    out.print(f"{plan.version}: {plan.tensors} tensors, {plan.bytes:,} bytes")
    out.print(
        f"{counted(plan.buckets, 'bucket')} of {bytes_text(plan.bucket_bytes)} from {counted(plan.senders, 'sender')}; "
        f"{where} copies {plan.h2d_gb_per_second:.3g} GB/s from the host, {plan.reload_gb_per_second:.3g} GB/s within"
    )
    print_table(
        ["mode", "predicted, s", "GB/s", "buffers"],
        [
            [
                f"{row.mode}{' (chosen)' if row.mode == plan.chosen else ''}",
                number(row.seconds),
                f"{row.gb_per_second:.1f}",
                bytes_text(row.buffer_bytes),
            ]
            for row in plan.modes
        ],
    )
