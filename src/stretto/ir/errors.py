"""Errors a user can cause; each message states the fact, the values and the way out."""

_LONGEST = 300  # characters of what an error says, where it is only a part of what is said


class StrettoError(Exception):
    """Base of all errors of this package."""

    is_told = False
    """Whether its words say all, because another process reported it or was watched. The place where it was raised says
    nothing then; uncaught, it is printed as one line."""


class MissingPackageError(StrettoError, ImportError):
    """A package is not installed that only a part of the system needs."""


class PlanError(StrettoError, ValueError):
    """A schedule cannot be made for these sizes, or rows do not form a plan."""


class TextError(StrettoError, ValueError):
    """A file or text is not in the form it should have."""


class CostError(StrettoError, ValueError):
    """A cost is missing, negative, not a number, or of the wrong shape."""


class ProgramError(StrettoError, ValueError):
    """A program cannot run."""


class PipelineError(StrettoError):
    """A step cannot be run as it was asked for, or failed, here or on another rank."""


class PeerError(StrettoError):
    """Ranks that work together cannot go on: one of them failed, died, stood still, or was given something else."""

    is_told = True


def told(text: str) -> PipelineError:
    """The same of the ranks of a pipeline."""
    error = PipelineError(text)
    error.is_told = True
    return error


class WeightsError(StrettoError):
    """A push of weights cannot be made as it was asked for, or failed, at a sender or a receiver."""


def named(error: BaseException) -> str:
    """An error by its type and what it says, if it says anything."""
    return ": ".join(filter(None, (type(error).__name__, one_line(error))))


def one_line(error: BaseException) -> str:
    """What an error says, whatever that is."""
    try:
        text = str(error)
    except BaseException as broken:
        text = f"(an error that cannot say what it is: {type(broken).__name__})"
    words = " ".join(text.encode(errors="replace").decode().split())
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"
