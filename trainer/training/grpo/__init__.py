"""GRPO on recorded traces, with torch and TRL."""
