"""Chooses a memory policy by costs: what to offload, and how much of it."""

from stretto.choose.choice import DeviceChoice as DeviceChoice
from stretto.choose.choice import MemoryChoice as MemoryChoice
from stretto.choose.choice import StageChoice as StageChoice
from stretto.choose.choose import choose_memory as choose_memory
