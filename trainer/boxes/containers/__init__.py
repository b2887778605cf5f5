"""Boxes that a container engine makes: Podman, Docker, Apptainer."""
