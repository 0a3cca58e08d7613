"""Schedules: pure functions that make plans."""
