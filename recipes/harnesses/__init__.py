"""Harness presets, one TOML file each. `rolltap.trainer.rollouts.harness` documents the keys."""
