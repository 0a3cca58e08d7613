"""The receiving side, inside an inference process: opens the sender's buffers and loads tensors from them."""
