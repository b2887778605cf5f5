"""The online loop: roll out, train, publish, and again."""
