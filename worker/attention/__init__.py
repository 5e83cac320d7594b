"""Attention over pages: one protocol, its backends, and the suite that each of them passes."""
