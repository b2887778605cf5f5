"""A run in the browser: `rolltap view`."""
