"""A traced function as a map from parameters to losses, and its derivatives at layers."""
