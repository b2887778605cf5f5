"""Tasks, the sources that they come from, and the folders that they start from."""
