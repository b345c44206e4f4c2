"""The K-FAC optimizer, as an object and as optax transformations."""
