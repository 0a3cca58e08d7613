"""A small but honest inference engine, whose weights can be pushed while it serves."""

from mini_engine.engine import Engine, Generated
from mini_engine.gate import Aborted, Unavailable
from mini_engine.model import CONFIGS, Config, checkpoint, entries, reference
from mini_engine.ranks import addresses
from mini_engine.server import Server
from mini_engine.shard import Shard

__all__ = [
    "CONFIGS",
    "Aborted",
    "Config",
    "Engine",
    "Generated",
    "Server",
    "Shard",
    "Unavailable",
    "addresses",
    "checkpoint",
    "entries",
    "reference",
]
