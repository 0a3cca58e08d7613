"""The error of groups whose ranks share a GPU or a machine."""


class GroupError(RuntimeError):
    """A group cannot go on: a rank is gone, is stuck, or calls something else than the others."""
