"""Conversation to prompt token ids and back."""
