"""The modules that vLLM's own environment imports. They use nothing but Python's standard
library."""
