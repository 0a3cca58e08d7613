"""Weights: push a version of a model into live inference engines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.ir.extras import demand

if TYPE_CHECKING:
    from stretto.ir.errors import WeightsError
    from stretto.weights.conversation import Hooks
    from stretto.weights.export import Export
    from stretto.weights.manifest import Entry
    from stretto.weights.receiver import Receiver
    from stretto.weights.remotes import status
    from stretto.weights.report import PushError, Report
    from stretto.weights.sender import Sender

__all__ = ["Entry", "Export", "Hooks", "PushError", "Receiver", "Report", "Sender", "WeightsError", "status"]

_ROOMS = {
    "Entry": "manifest",
    "Export": "export",
    "Hooks": "conversation",
    "PushError": "report",
    "Receiver": "receiver",
    "Report": "report",
    "Sender": "sender",
    "status": "remotes",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Most need PyTorch, and are imported when they are asked for."""
    if name == "WeightsError":
        return import_module("stretto.ir.errors").WeightsError
    if name in _ROOMS:
        demand("torch", extra="train", what=f"stretto.weights.{name}")
        return getattr(import_module(f"stretto.weights.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'stretto.weights' has no attribute {name!r}")
