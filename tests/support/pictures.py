"""Reads figures."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text


def svg_texts(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_text())
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


class DrawnFigure(Figure):
    """A figure that notes which of its words and legends the file cut off."""

    cut_off: list[str]

    def savefig(self, *arguments: Any, **options: Any) -> None:
        super().savefig(*arguments, **options)
        self.draw_without_rendering()  # places all again, by its own resolution and not the file's
        beyond = {
            label
            for axes in self.findobj(Axes)
            for time, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
            if not axes.get_xlim()[0] <= time <= axes.get_xlim()[1]  # which are not drawn
        }
        unseen = {
            text
            for axes in self.axes
            if not axes.axison
            for axis in (axes.xaxis, axes.yaxis)
            for text in axis.findobj(Text)
        }
        words = {text for text in self.findobj(Text) if text.get_text() and text.get_visible()} - beyond - unseen
        boxes = [(word.get_text(), word.get_window_extent()) for word in words]
        boxes += [("legend", legend.get_window_extent()) for legend in self.legends]
        left, bottom, right, top = self.bbox.extents
        type(self).cut_off = [
            name
            for name, box in boxes
            if not (left <= box.x0 + 1 and bottom <= box.y0 + 1 and box.x1 <= right + 1 and box.y1 <= top + 1)
        ]
