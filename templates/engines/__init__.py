"""Thin hooks for inference engines. Importing one imports no engine."""
