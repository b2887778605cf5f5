"""The commands of `rolltap` that read and write run folders."""
