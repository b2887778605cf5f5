"""The commands of `rolltap`, one a file."""
