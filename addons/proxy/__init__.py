"""mitmproxy's connections, with bounds, and the address that the proxy listens on."""
