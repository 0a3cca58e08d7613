"""The process in the middle of ranks that share a GPU or a machine, and what they agree on with it. Without PyTorch."""
