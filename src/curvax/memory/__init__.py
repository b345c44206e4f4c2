"""Memory budgets: what a program needs, what there is, and the largest size that fits."""
