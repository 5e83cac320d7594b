"""Decisions only, pure: retention, routing, replication, migration."""
