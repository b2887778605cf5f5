"""The forward pass of the trainer: rows of traces to log-probabilities, padded or with shared prefixes once."""
