"""The program that has boxes on a machine behind ssh."""
