"""`stretto doctor`: test that everything works on this machine."""

from typing import Annotated, cast

import msgspec
import typer

from stretto.cli.console import err, out
from stretto.cli.inputs import Json
from stretto.ir.errors import PlanError
from stretto.ir.extras import require

_SETTINGS = ("gloo", "nccl", "onegpu")


def doctor(
    backend: Annotated[
        str | None,
        typer.Option(help="How ranks communicate. [default: nccl with several GPUs, onegpu with one, gloo with none]"),
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", "-d", help="Ranks. [default: 4, or one per GPU with nccl]")
    ] = None,
    seconds: Annotated[int, typer.Option(min=10, help="Time limit in seconds.")] = 110,
    json: Json = False,
) -> None:
    """Test that everything works on this machine.

    Several GPUs run one rank each over NCCL, one GPU runs four ranks (onegpu), and a machine without a
    GPU runs four processes over gloo. Every schedule trains a tiny model for two steps; its losses and
    gradients must match those of one process (float64, to 1e-12). Then messages between neighbours are
    timed, and weights are pushed into a separate process, which verifies every byte.

    Exit code 0: everything works. 1: something failed. It takes less than two minutes.

    Examples:

      stretto doctor

      stretto doctor --backend gloo -d 2 --json
    """
    require("torch", extra="train", what="stretto doctor")
    from stretto.doctor.examine import examine
    from stretto.doctor.report import Check, Setting

    if backend is not None and backend not in _SETTINGS:
        raise PlanError(f"--backend is one of {', '.join(_SETTINGS)} (got {backend})")
    with err.status("starting ranks") as status:
        report = examine(
            cast("Setting | None", backend),
            devices,
            seconds=seconds,
            progress=lambda what: status.update(f"tried {what}"),
        )
    if json:
        out.print(msgspec.json.format(msgspec.json.encode(report)).decode())
        raise typer.Exit(1 if report.failed else 0)

    def print_checks(title: str, checks: list[Check]) -> None:
        out.print(f"\n{title}")
        for check in checks:
            out.print(f"  {check.state:<8}{check.what:<22} {check.said}")

    out.print(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    out.print(f"{report.ranks} ranks over {report.setting}")
    print_checks(
        "training, two steps beside one process: the worst relative error of losses and gradients", report.training
    )
    print_checks("messages of 64 MiB, and how long 1 KiB takes", report.links)
    print_checks("a push into a running process", report.push)
    out.print("\nuntested here:\n" + "\n".join(f"  {what}" for what in report.untested))
    failed, count = len(report.failed), len(report.checks)
    out.print(f"\n{f'{failed} of {count} failed' if failed else 'all well'}, {report.seconds:.0f} s")
    raise typer.Exit(1 if failed else 0)
