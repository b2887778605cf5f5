"""Tries a program without vLLM: an engine with scripted replies leads it, and what the recorder saw
is explained."""
