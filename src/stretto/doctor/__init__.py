"""Checks that Stretto works on this machine: trains every schedule, times links between ranks, pushes weights."""
