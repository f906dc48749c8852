"""Isthmus on the host CPU."""
