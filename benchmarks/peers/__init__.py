"""Comparisons with other engines, each in a virtual environment of its own."""
