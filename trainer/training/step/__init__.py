"""One training step: traces to gradients, by one packed pass through the stock model."""
