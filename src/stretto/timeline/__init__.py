"""Timelines: when every task of a program started and ended, simulated or measured, and their metrics."""

from stretto.timeline.allocated import AllocatedMemory as AllocatedMemory
from stretto.timeline.files import load_timeline as load_timeline
from stretto.timeline.fit import fit as fit
from stretto.timeline.memory import DeviceMemory as DeviceMemory
from stretto.timeline.memory_bound import memory_bound as memory_bound
from stretto.timeline.timeline import DeviceSummary as DeviceSummary
from stretto.timeline.timeline import Span as Span
from stretto.timeline.timeline import Summary as Summary
from stretto.timeline.timeline import Timeline as Timeline
