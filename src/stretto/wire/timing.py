"""How long peers may be silent. Read as `timing.SILENCE` when needed, so that a test can set it shorter."""

BEAT = 0.5  # seconds between two heartbeats
SILENCE = 6.0  # seconds; no peer counts as stopped before it was silent for this long
