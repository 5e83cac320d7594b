"""Ray: start, place, watch, drain, scale; the pie command; pie.toml."""
