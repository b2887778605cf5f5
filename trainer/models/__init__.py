"""The policy on the disk: loading it, and saving what training changed."""
