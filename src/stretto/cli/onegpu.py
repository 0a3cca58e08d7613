"""`stretto onegpu`: several ranks on one GPU."""

from typing import Annotated

import typer

from stretto.cli.console import err, out
from stretto.ir.extras import demand
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
    script: Annotated[str, typer.Argument(help="A script as torchrun takes it, and its arguments.")],
    devices: Annotated[int, typer.Option("--devices", "-d", help="Ranks, each with an equal share of the GPU.")] = 4,
    link: Annotated[
        str | None,
        typer.Option(
            help=f"Let messages take as long as on such links: {', '.join(PRESETS)} or GB/s:µs such as 400:3."
        ),
    ] = None,
    mps: Annotated[
        bool, typer.Option(help="Ranks run at the same time, by CUDA MPS. Without, they take turns.")
    ] = True,
) -> None:
    """Run a script by torchrun, as many ranks as you like on the one GPU you have.

    In the script, `import stretto.onegpu` and `init_process_group("onegpu")`; all ranks use cuda:0.

    Examples:

      stretto onegpu run --devices 4 train.py --steps 10

      stretto onegpu run -d 8 --link nvlink benchmarks/onegpu/prove.py numerics
    """
    demand("torch", extra="train", what="stretto onegpu")
    if link is not None:
        SimulatedLink.parse(link)
    if not mps:
        err.print("without MPS the ranks take turns on the GPU: right, but slower")
    raise typer.Exit(launch([script, *context.args], devices, link=link, mps=mps))
