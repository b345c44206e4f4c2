"""Linear algebra of blocks: PSD powers, Kronecker products, moving averages."""
