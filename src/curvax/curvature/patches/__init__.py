"""Patches of a convolution's inputs, and their moments."""
