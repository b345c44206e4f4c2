"""Detection of layers in a traced program."""
