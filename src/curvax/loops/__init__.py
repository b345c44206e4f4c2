"""Scans that save, keep or rematerialise only part of what they compute."""
