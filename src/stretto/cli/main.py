"""The `stretto` command."""

import io
import os
import sys
from typing import Annotated

import typer

from stretto import __version__
from stretto.cli.check import check
from stretto.cli.compare import compare
from stretto.cli.console import err, out
from stretto.cli.doctor import doctor
from stretto.cli.onegpu import app as onegpu
from stretto.cli.push import push
from stretto.cli.show import show
from stretto.cli.simulate import simulate
from stretto.ir.errors import StrettoError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (show, simulate, check, compare, push, doctor):
    app.command()(command)
app.add_typer(onegpu, name="onegpu")

# The base class of errors that typer raises for a bad command line. It is click's, of which typer carries a copy
# whose import path varies between versions.
_BadCommandLine: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"stretto {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def stretto(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, check, simulate and compare pipeline schedules and weight updates; push weights. Start with: stretto show

    Exit code 0: success. 1: a schedule has violations, a push failed, or doctor found a failure. 2: bad input. One
    line says why.
    """
    if context.invoked_subcommand is None:
        out.print(context.get_help())


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without − and · shows ? instead of failing
    try:
        code = app(standalone_mode=False)
    except StrettoError as error:
        code = _fail(str(error))
        code = getattr(error, "code", code)
    except _BadCommandLine as error:
        code = _fail(f"{getattr(error, 'format_message', error.__str__)()} (see stretto --help)")
    except MemoryError:
        code = _fail("this is too large for the memory of this machine")
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:  # of standard output: files that users name have errors of their own
        code = _fail(f"cannot write the output: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    err.print("stretto: " + " ".join(message.split()))
    return 2
