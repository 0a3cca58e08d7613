"""`stretto onegpu`: several ranks on one GPU."""

from typing import Annotated

import typer

from stretto.cli.console import err, out
from stretto.ir.extras import require
from stretto.onegpu_broker.launch import launch
from stretto.onegpu_broker.link_model import PRESETS, SimulatedLink

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def onegpu(context: typer.Context) -> None:
    """Run several ranks on one GPU."""
    if context.invoked_subcommand is None:
        out.print(context.get_help())


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A script and its arguments, as for torchrun.")],
    devices: Annotated[int, typer.Option("--devices", "-d", help="Ranks, each with an equal share of the GPU.")] = 4,
    link: Annotated[
        str | None,
        typer.Option(help=f"Delay messages as on such links: {', '.join(PRESETS)} or GB/s:µs such as 400:3."),
    ] = None,
    mps: Annotated[
        bool, typer.Option(help="Run ranks at the same time with CUDA MPS; without it, they take turns.")
    ] = True,
) -> None:
    """Run a script with torchrun, with any number of ranks on one GPU.

    In the script, `import stretto.onegpu` and `init_process_group("onegpu")`; all ranks use cuda:0.

    Examples:

      stretto onegpu run --devices 4 train.py --steps 10

      stretto onegpu run -d 8 --link nvlink benchmarks/onegpu/prove.py numerics
    """
    require("torch", extra="train", what="stretto onegpu")
    if link is not None:
        SimulatedLink.parse(link)
    if not mps:
        err.print("without MPS the ranks take turns on the GPU: right, but slower")
    raise typer.Exit(launch([script, *context.args], devices, link=link, mps=mps))
