"""Runs checked programs on PyTorch: real tensors, real autograd, real process groups."""
