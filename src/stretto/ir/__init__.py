"""Schedules as data: actions, placements, plans, and their text."""
