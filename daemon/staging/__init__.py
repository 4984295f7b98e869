"""Staging in a process of its own, at a lower priority, so that it costs those who decode next to nothing."""
