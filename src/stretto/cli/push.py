"""`stretto push`: push a checkpoint into running inference engines."""

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import msgspec
import typer

from stretto.cli.console import err, number, out, print_table
from stretto.cli.inputs import Json, figure_kind, size_with_unit, write_figure
from stretto.cli.push_plan import device_kind, predict_push
from stretto.ir.errors import WeightsError, one_line
from stretto.ir.extras import require
from stretto.program.update import MODES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.weights import Report

_REPORT_TIME = 20.0  # seconds at most; torchrun ends the process once the first rank has exited


@contextmanager
def _report_once() -> "Iterator[None]":
    """Let only the first rank on each machine report a WeightsError: all ranks raise the same one."""
    try:
        yield
    except WeightsError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_REPORT_TIME)  # torchrun ends all ranks when one fails: the first must report before that
            raise typer.Exit(error.code if isinstance(error, FailedPushError) else 2) from error
        raise


class FailedPushError(WeightsError):
    """The push itself failed, after receivers were contacted; the input was good."""

    code = 1


@_report_once()
def push(
    checkpoint: Annotated[Path, typer.Argument(help="A safetensors file, or a directory of them.")],
    to: Annotated[
        list[str] | None, typer.Option(help="A receiver: unix:///path or tcp://host:port. Repeat it, or use commas.")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="The version's name at the receivers. [default: the checkpoint's name]")
    ] = None,
    in_flight: Annotated[str, typer.Option(help="What to do with running generations: wait, abort or keep.")] = "wait",
    mode: Annotated[
        str | None, typer.Option(help="serial, overlap_reload or overlap_all. [default: the fastest that fits]")
    ] = None,
    bucket: Annotated[str | None, typer.Option(help="Size of a bucket, and so of each buffer, e.g. 512MiB.")] = None,
    split: Annotated[
        bool, typer.Option("--split", help="Send tensors larger than a bucket in parts, to receivers that support it.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a receiver may take to pause, to finish, and to resume.")
    ] = 60.0,
    bucket_timeout: Annotated[
        float | None, typer.Option(help="Seconds that a receiver may take for a bucket. [default: 8]")
    ] = None,
    secret_file: Annotated[Path | None, typer.Option(help="File with the secret that tcp receivers require.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda if there is a GPU]")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Between senders: gloo, nccl or onegpu. [default: by the device]")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the plan and its predicted time; contact no receiver.")
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option("--devices", "-d", help="Senders, for --dry-run. [default: as many as torchrun starts, or 1]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the timeline as .svg, .png, or .trace.json for Perfetto."),
    ] = None,
    json: Json = False,
) -> None:
    """Push a checkpoint into live inference engines, pipelined and verified.

    Every receiver pauses, takes all tensors, and serves the new version once all receivers have them. If
    anything fails, one line says what and where; receivers that had begun are dirty until the next push.

    Exit code 0: all receivers serve the version. 1: the push failed; one line on stderr says why. 2: bad
    input; no receiver was paused. With --json, a failed push prints its error and the receivers that serve
    the version, if any.

    Run one sender per device: start them with torchrun next to the engines. Without torchrun there is one.

    Examples:

      stretto push step-100.safetensors --to unix:///run/user/1000/engine-0

      torchrun --nproc-per-node 8 -m stretto push checkpoint/ --to $ADDRESSES --in-flight keep

      stretto push checkpoint/ --dry-run --devices 8
    """
    require("torch", extra="train", what="stretto push")
    from stretto.weights.messages import InFlight
    from stretto.weights.sources.safetensors import Safetensors

    if in_flight not in get_args(InFlight):
        raise WeightsError(f"--in-flight is one of {', '.join(get_args(InFlight))} (got {in_flight!r:.40})")
    if mode is not None and mode not in MODES:
        raise WeightsError(f"--mode is one of {', '.join(MODES)} (got {mode!r:.40})")
    addresses = [address for option in to or [] for address in option.split(",") if address]
    files = Safetensors(checkpoint)
    name = version or checkpoint.resolve().name
    options: dict[str, Any] = {"split": split, "bucket_bytes": None if bucket is None else _bucket_bytes(bucket)}
    if output is not None and figure_kind(output) not in (".svg", ".png", ".trace.json"):
        raise WeightsError(f"-o draws .svg, .png or .trace.json (got {output})")
    if output is not None and not os.access(output.parent, os.W_OK):  # before anything is pushed
        raise WeightsError(f"cannot write {output}: no directory to write into")
    if dry_run:
        if not _rank():
            senders = _ranks() if devices is None else devices
            predict_push(files, name, senders, mode=mode, device=device, output=output, json=json, **options)
        return
    if devices is not None:
        raise WeightsError("--devices is for --dry-run; torchrun --nproc-per-node starts as many senders as you like")
    if not addresses:
        raise WeightsError("say where to push to: --to unix:///path (or --dry-run)")
    with _senders(device, backend) as (rank, mesh, where), _bar(shown=rank == 0 and not json) as bar:
        from stretto.weights.send.sender import Sender

        waits: dict[str, Any] = {"timeout": timeout, "bucket_timeout": bucket_timeout}
        with Sender(mesh, device=where, secret_file=secret_file, **waits, **options) as sender:
            sender.homes(addresses)  # first, so that a wrong address fails at once
            nbytes = sum(tensor.entry.nbytes for tensor in files.held())
            bar("registering", 0, nbytes)
            sender.register(name, files)
            try:
                report = sender.push(
                    name,
                    addresses,
                    in_flight=cast("InFlight", in_flight),
                    mode=mode,
                    record=output is not None,
                    progress=lambda done, total: bar("pushing", nbytes * done // total, nbytes),
                )
            except WeightsError as error:
                if json and rank == 0:
                    _print_failure(name, error)
                raise FailedPushError(str(error)) from error
        if rank == 0:
            _print_report(report, output, json=json)


def _bucket_bytes(text: str) -> int:
    """Read the size of a bucket, rounded down to a multiple of 256 bytes."""
    size = size_with_unit("--bucket", text)
    if not 1024 <= size <= 2**40:
        raise WeightsError(f"--bucket is a size from 1KiB to 1TiB (got {text!r:.40})")
    return int(size) // 256 * 256


@contextmanager
def _senders(device: str | None, backend: str | None) -> "Iterator[tuple[int, Any, Any]]":
    """Yield this process's rank, its mesh and its device."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    kind, size = device_kind(device), _ranks()
    where = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))
    if kind == "cuda":
        torch.cuda.set_device(where)
    else:
        where = torch.device("cpu")
    if size == 1:
        yield 0, None, where
        return
    if backend == "onegpu":
        import stretto.onegpu  # noqa: F401  (registers the backend)
    dist.init_process_group(backend or ("nccl" if kind == "cuda" else "gloo"))
    try:
        yield _rank(), init_device_mesh(kind, (size,)), where
    finally:
        dist.destroy_process_group()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def _bar(*, shown: bool) -> "Iterator[Any]":
    """Show a progress bar on a terminal: the current step, its progress and its speed."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err, disable=not shown or not err.is_terminal, transient=True) as progress:
        tasks = {"connecting": progress.add_task("connecting", total=None)}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:  # each step has its own speed
                for before in tasks.values():
                    progress.update(before, visible=False)
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        yield advance


def _print_failure(version: str, error: WeightsError) -> None:
    receivers = {name: getattr(error, name, {}) for name in ("serving", "failed", "unknown")}
    fields = {"version": version, "error": str(error), **receivers}
    out.print(msgspec.json.format(msgspec.json.encode(fields)).decode())


def _print_report(report: "Report", output: Path | None, *, json: bool) -> None:
    from stretto.weights.send.report import counted, size

    written = output is not None and _write_timeline(report, output)
    if json:
        fields = {
            "version": report.version,
            "content": report.content,
            "bytes": report.nbytes,
            "buckets": report.buckets,
            "bucket_bytes": report.bucket_bytes,
            "mode": report.mode,
            "seconds": report.seconds,
            "gb_per_second": report.gb_per_second,
            "steps": {
                name: {"predicted": step.predicted, "actual": step.actual} for name, step in report.steps.items()
            },
            "receivers": report.receivers,
        }
        out.print(msgspec.json.format(msgspec.json.encode(fields)).decode())
        return
    rate = f"{size(report.nbytes)} in {report.seconds:.3g} s, {report.gb_per_second:.3g} GB/s"
    out.print(
        f"{report.version} ({report.content[:8]}): {rate}; {counted(report.buckets, 'bucket')}, mode {report.mode}"
    )
    print_table(
        ["step", "predicted, s", "took, s"],
        [[name, number(step.predicted), number(step.actual)] for name, step in report.steps.items()],
    )
    for name, how in report.receivers.items():
        out.print(f"{name} serves it, {how}")
    if written:
        out.print(f"wrote {output}")


def _write_timeline(report: "Report", output: Path) -> bool:
    """Write the timeline; if that fails, print a note and return False, for the push itself has succeeded."""
    try:
        if report.timeline is None:
            raise WeightsError("other senders could not be asked for their times")
        write_figure(report.timeline, output)
    except Exception as error:
        err.print(f"the push has gone well, but {output} could not be written: {one_line(error)}")
        return False
    return True
