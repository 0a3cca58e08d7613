"""Adapters for other inference engines."""

from stretto.weights.adapters.http import Http as Http
from stretto.weights.adapters.served import Served as Served
from stretto.weights.adapters.served import Server as Server
