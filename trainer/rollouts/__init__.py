"""Running harnesses on tasks: each session in its own workspace copy, under its own proxy credentials."""
