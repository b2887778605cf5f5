"""The online loop: roll out, train, publish, again."""
