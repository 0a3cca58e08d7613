"""When every task of a program started and ended, simulated or measured, and what that says."""

from stretto.timeline.fit import fit as fit
from stretto.timeline.memory import DeviceMemory as DeviceMemory
from stretto.timeline.memory import memory_in_order as memory_in_order
from stretto.timeline.timeline import DeviceSummary as DeviceSummary
from stretto.timeline.timeline import Span as Span
from stretto.timeline.timeline import Summary as Summary
from stretto.timeline.timeline import Timeline as Timeline
