"""Proves a program sound, or says in words what is wrong with it."""

from stretto.check.check import check as check
from stretto.check.check import validate_sound as validate_sound
from stretto.check.violation import Violation as Violation
