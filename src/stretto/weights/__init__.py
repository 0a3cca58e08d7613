"""Weights: push a version of a model into live inference engines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.ir.extras import demand

if TYPE_CHECKING:
    from stretto.weights.conversation import Hooks
    from stretto.weights.export import Export
    from stretto.weights.manifest import Entry
    from stretto.weights.receiver import Receiver
    from stretto.weights.remotes import status
    from stretto.weights.report import Report
    from stretto.weights.sender import Sender

__all__ = ["Entry", "Export", "Hooks", "Receiver", "Report", "Sender", "status"]

_ROOMS = {
    "Entry": "manifest",
    "Export": "export",
    "Hooks": "conversation",
    "Receiver": "receiver",
    "Report": "report",
    "Sender": "sender",
    "status": "remotes",
}


def __getattr__(name: str) -> Any:
    """Each needs PyTorch, and is imported when it is asked for."""
    if name in _ROOMS:
        demand("torch", extra="train", what=f"stretto.weights.{name}")
        return getattr(import_module(f"stretto.weights.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'stretto.weights' has no attribute {name!r}")
