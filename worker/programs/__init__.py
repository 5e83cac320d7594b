"""Users' programs on a worker: their working sets, their passes, their processes."""
