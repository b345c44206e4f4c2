"""Jacobians, Hessians and related matrices, computed in blocks, in memory or on disk."""
