"""Jacobians, Hessians and their parts, in blocks.

`_disk` keeps a result that does not fit in memory; `_fingerprint` says which result it is.
"""
