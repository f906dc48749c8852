"""Isthmus on NVIDIA GPUs."""
