"""The error of groups whose ranks share a GPU or a machine."""

from stretto.ir.errors import StrettoError


class GroupError(StrettoError, RuntimeError):
    """A group cannot go on: a rank is gone, is stuck, or calls something else than the others.

    It is a RuntimeError too, as every error of a torch.distributed group is.
    """
