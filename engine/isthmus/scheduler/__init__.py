"""What runs next, and on which blocks. Torch-free."""
