"""Pictures of timelines."""

from stretto.draw.text import draw_rich as draw_rich
from stretto.draw.text import draw_text as draw_text
