"""What processes that talk to each other have in common: who is at the other end, and memory that both see."""
