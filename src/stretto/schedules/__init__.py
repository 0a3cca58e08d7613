"""Schedules: pure functions that make plans. A file here that registers a schedule is found automatically.

>>> from stretto.schedules import SCHEDULES
>>> list(SCHEDULES)[:3]
['gpipe', 'one_f_one_b', 'interleaved']
"""

from importlib import import_module
from pkgutil import iter_modules

from stretto.ir.action import Action as Action
from stretto.ir.action import Op as Op
from stretto.ir.action import Pair as Pair
from stretto.ir.placement import Placement as Placement
from stretto.schedules.dualpipe import dualpipe as dualpipe
from stretto.schedules.dualpipe import dualpipev as dualpipev
from stretto.schedules.forward_only import forward_only as forward_only
from stretto.schedules.gpipe import gpipe as gpipe
from stretto.schedules.interleaved import interleaved as interleaved
from stretto.schedules.one_f_one_b import one_f_one_b as one_f_one_b
from stretto.schedules.registry import SCHEDULES as SCHEDULES
from stretto.schedules.registry import register as register
from stretto.schedules.vshape import v_half as v_half
from stretto.schedules.vshape import v_min as v_min
from stretto.schedules.vshape import zb_v as zb_v
from stretto.schedules.zero_bubble import zb_h1 as zb_h1
from stretto.schedules.zero_bubble import zb_h2 as zb_h2

for _module in iter_modules(__path__):  # so that a new file needs no line here
    import_module(f"{__name__}.{_module.name}")
