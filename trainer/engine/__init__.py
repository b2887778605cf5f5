"""Operation of a vLLM server: start it, query it, publish weights to it."""
