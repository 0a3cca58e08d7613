"""Hypothesis profiles: the default repeats the same examples; `--hypothesis-profile=thorough` explores."""

from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=3000, print_blob=True)
settings.load_profile("default")
