"""Curvature estimators: K-FAC and relatives, exact products, operators and spectra."""
