"""Scans that keep or rematerialise part of what they compute, such as `checkpointed_scan`."""
