"""The commands of `rolltap`, a group of them a file."""
