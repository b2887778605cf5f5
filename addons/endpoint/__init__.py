"""The endpoint: a model API on loopback that answers redirected calls and records them."""
