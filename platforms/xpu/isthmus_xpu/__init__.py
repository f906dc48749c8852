"""Isthmus on Intel GPUs."""
