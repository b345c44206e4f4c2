"""Meshes: axes, placement of arrays, and work that is distributed over devices."""
