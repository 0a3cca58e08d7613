"""Pictures of timelines."""

from stretto.draw.comparison import draw_comparison as draw_comparison
from stretto.draw.figure import draw_figure as draw_figure
from stretto.draw.text import draw_rich as draw_rich
from stretto.draw.text import draw_text as draw_text
from stretto.timeline.files import FIGURES

FIGURES[".svg"] = FIGURES[".png"] = draw_figure
