"""The cost table: how long each kind of task takes, and how many bytes it holds.

>>> from stretto.costs import Costs, Link
>>> Costs(F=1, I=1, W=1, link=Link(latency=0.1)).link.latency
0.1
"""

__all__ = ["BucketTimes", "Costs", "Link", "PhaseTimes", "SharedResource", "WovenTimes"]

from stretto.costs.parts import BYTES as BYTES
from stretto.costs.parts import LANES as LANES
from stretto.costs.parts import BucketTimes as BucketTimes
from stretto.costs.parts import Link as Link
from stretto.costs.parts import Loads as Loads
from stretto.costs.parts import PerStage as PerStage
from stretto.costs.parts import PhaseTimes as PhaseTimes
from stretto.costs.parts import SharedResource as SharedResource
from stretto.costs.parts import Unit as Unit
from stretto.costs.parts import WovenTimes as WovenTimes
from stretto.costs.table import Costs as Costs
from stretto.costs.table import costs_or_default as costs_or_default
from stretto.costs.table import family as family
from stretto.costs.text import costs_from as costs_from
from stretto.costs.text import load_costs as load_costs
from stretto.costs.text import parse_costs as parse_costs
from stretto.costs.text import parse_costs_toml as parse_costs_toml
from stretto.costs.validate import link_ends as link_ends
