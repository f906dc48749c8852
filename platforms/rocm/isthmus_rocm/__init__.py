"""Isthmus on AMD GPUs."""
