"""vLLM as the recorder sees it."""
