"""Isthmus on Google TPUs."""
