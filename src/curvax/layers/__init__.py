"""Layers of a model: tags, detection, the registration report, and derivatives at layers."""
