"""Reads figures."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path


def svg_texts(path: Path) -> list[str]:
    root = ElementTree.fromstring(path.read_text())
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
