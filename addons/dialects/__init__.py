"""One module per model API: pure functions between bytes on the wire and `ModelCall`, no I/O."""
