"""The page index: places publish what they hold, routers and tools read it."""
