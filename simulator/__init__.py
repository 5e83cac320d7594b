"""Mock engine and virtual clock: a trace through the same router, scheduler, cache and policies."""
