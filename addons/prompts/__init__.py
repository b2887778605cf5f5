"""Conversation to prompt token ids, and sampled token ids to a reply."""
