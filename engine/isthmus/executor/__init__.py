"""Workers and the ways to reach them."""
