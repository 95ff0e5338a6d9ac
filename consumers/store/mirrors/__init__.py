"""Copies of the routes where other systems look for them."""
