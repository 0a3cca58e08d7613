"""Pictures of timelines."""

from stretto.draw.comparison import draw_comparison as draw_comparison
from stretto.draw.figure import draw_figure as draw_figure
from stretto.draw.insets import draw_insets as draw_insets
from stretto.draw.text import draw_rich as draw_rich
from stretto.draw.text import draw_text as draw_text
from stretto.draw.trace import draw_trace as draw_trace
from stretto.draw.trace import parse_trace as parse_trace
