"""The recorder: mitmproxy addons that answer model calls from vLLM and record them. Does not import
torch."""
