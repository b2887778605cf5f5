"""One package per model API: bytes on the wire to `ModelCall`, and `Reply` to bytes. No I/O."""
