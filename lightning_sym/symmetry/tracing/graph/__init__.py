"""Captured graphs: capture, operations with their traits, queries, rewriting."""
