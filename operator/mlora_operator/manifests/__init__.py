"""Kubernetes objects as plain dicts, from pure functions: a test compares them whole."""
