"""A model API on loopback: answers the calls that the proxy redirects, and records them."""
