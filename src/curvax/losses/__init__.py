"""Loss functions, their Fisher and Gauss-Newton factors, and the functions that register them."""
