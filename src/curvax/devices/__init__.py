"""Meshes: axes, placement of arrays, and work that is divided among devices."""
