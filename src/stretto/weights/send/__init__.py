"""The sending side: registers versions in host memory, chooses a mode, and pushes into receivers."""
