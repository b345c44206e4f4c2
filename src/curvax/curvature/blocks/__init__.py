"""Curvature blocks: one representation of the curvature of one layer in each file."""
