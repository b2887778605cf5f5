"""A run folder: its records, its files and their guarantees."""
