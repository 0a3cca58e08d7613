"""The DeepSeek-V3 / Kimi K2 architecture, and models of Hugging Face `transformers`, as layers of a `Pipeline`."""
