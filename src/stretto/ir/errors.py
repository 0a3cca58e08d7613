"""Errors that a user can cause; each message states the fact, the values and the way out."""

_LONGEST = 300  # characters of an error's message when it is quoted inside another


class StrettoError(Exception):
    """Base class of all errors of this package."""

    from_peer = False
    """Whether the message says everything, because another process reported or caused the failure. A traceback would
    add nothing; uncaught, the error is printed as one line."""


class MissingPackageError(StrettoError, ImportError):
    """An optional package is not installed."""


class PlanError(StrettoError, ValueError):
    """A schedule cannot be made for these sizes, rows do not form a plan, or a memory policy is malformed."""


class TextError(StrettoError, ValueError):
    """A file or text is malformed, or cannot be read or written."""


class CostError(StrettoError, ValueError):
    """A cost is missing, negative, not a number, or of the wrong shape."""


class ProgramError(StrettoError, ValueError):
    """A program cannot run."""


class PipelineError(StrettoError):
    """A step cannot run as requested, or failed, on this rank or another."""


class PeerError(StrettoError):
    """Ranks that work together cannot continue: one of them failed, died, stalled, or was given different input."""

    from_peer = True


def peer_failure(text: str) -> PipelineError:
    """Return a PipelineError with `from_peer`: its message says everything."""
    error = PipelineError(text)
    error.from_peer = True
    return error


class WeightsError(StrettoError):
    """A push of weights cannot run as requested, or failed, at a sender or a receiver."""


def named(error: BaseException) -> str:
    """Return an error's type and its message, if it has one."""
    return ": ".join(filter(None, (type(error).__name__, one_line(error))))


def one_line(error: BaseException) -> str:
    """Return an error's message as one short line, even if the error cannot be printed."""
    try:
        text = str(error)
    except BaseException as broken:
        text = f"(an error that cannot say what it is: {type(broken).__name__})"
    words = " ".join(text.encode(errors="replace").decode().split())
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"
