"""Everything on the wire: mitmproxy addons that answer model calls from vLLM and record them. Never imports torch."""
