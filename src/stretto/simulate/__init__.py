"""Runs a program against a cost table."""

from stretto.simulate.engine import simulate as simulate
