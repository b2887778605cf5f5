"""Where sessions run: as processes of this machine, in a sandbox, in a container."""
