"""Tiers, the tiered cache, the pool node and its client."""
