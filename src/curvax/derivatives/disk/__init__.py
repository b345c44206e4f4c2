"""Matrices that are written to disk block by block and survive interruptions."""
