"""Recorded calls to traces, with a ledger of every sampled token."""
