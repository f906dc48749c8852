"""Isthmus on toy."""
