"""The broker process between ranks that share a GPU or a machine, and its protocol; it does not import PyTorch."""
