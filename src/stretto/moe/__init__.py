"""Mixtures of experts: the router, the order of tokens by expert, and the experts."""

from stretto.moe.experts import Experts, RoutedExperts
from stretto.moe.grouped_linear import GroupedLinear
from stretto.moe.router import Router

__all__ = ["Experts", "GroupedLinear", "RoutedExperts", "Router"]
