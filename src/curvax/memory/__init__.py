"""Memory budgets: what a program needs, what is available, and the largest size that fits."""
