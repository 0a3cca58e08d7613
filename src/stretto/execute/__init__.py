"""Runs programs, of training or of a weight update: an executor, its lanes, and a supervisor."""

from stretto.execute.local import execute

__all__ = ["execute"]
