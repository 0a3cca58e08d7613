"""Where pushed tensors come from: a training job's modules or safetensors files, and the export map applied to them."""
