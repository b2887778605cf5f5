"""A module or a package for each model API: bytes to `ModelCall`, `Reply` to bytes. No I/O."""
