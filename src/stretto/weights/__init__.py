"""Weights: push a version of a model into live inference engines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.ir.extras import require

if TYPE_CHECKING:
    from stretto.ir.errors import WeightsError
    from stretto.weights.connection import PeerClosed as PeerClosed
    from stretto.weights.ipc_buffers import device_name as device_name
    from stretto.weights.manifest import TensorSpec
    from stretto.weights.receive.receiver import Receiver
    from stretto.weights.receive.state import Hooks
    from stretto.weights.send.remotes import status
    from stretto.weights.send.report import PushError, Report
    from stretto.weights.send.sender import Sender
    from stretto.weights.sources.export import Export

__all__ = [
    "Export",
    "Hooks",
    "PeerClosed",
    "PushError",
    "Receiver",
    "Report",
    "Sender",
    "TensorSpec",
    "WeightsError",
    "device_name",
    "status",
]

_MODULES = {
    "Export": "sources.export",
    "Hooks": "receive.state",
    "PeerClosed": "connection",
    "PushError": "send.report",
    "Receiver": "receive.receiver",
    "Report": "send.report",
    "Sender": "send.sender",
    "TensorSpec": "manifest",
    "device_name": "ipc_buffers",
    "status": "send.remotes",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: most of them need PyTorch."""
    if name == "WeightsError":
        return import_module("stretto.ir.errors").WeightsError
    if name in _MODULES:
        require("torch", extra="train", what=f"stretto.weights.{name}")
        return getattr(import_module(f"stretto.weights.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'stretto.weights' has no attribute {name!r}")
