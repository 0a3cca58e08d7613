"""The sending side: registers versions in host memory, chooses a plan, and pushes into receivers."""
