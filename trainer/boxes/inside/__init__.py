"""Programs that run in a box, or join one: scripts of their own, with the standard library only."""
