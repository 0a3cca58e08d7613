"""Mixtures of experts: router, order of tokens by expert, experts, their phases, and the exchange between ranks."""

from stretto.moe.all_to_all import AllToAll
from stretto.moe.exchange import Counted, Dispatched, Exchange
from stretto.moe.expert_phases import Routed, expert_phases
from stretto.moe.expert_ranks import ExpertRanks
from stretto.moe.experts import Experts, RoutedExperts
from stretto.moe.grouped_linear import GroupedLinear
from stretto.moe.router import Router

__all__ = [
    "AllToAll",
    "Counted",
    "Dispatched",
    "Exchange",
    "ExpertRanks",
    "Experts",
    "GroupedLinear",
    "Routed",
    "RoutedExperts",
    "Router",
    "expert_phases",
]
