"""Where pushed tensors come from: a training job's modules, safetensors files, and the checkpoint made of them."""
