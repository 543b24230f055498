"""Small helpers that belong to no floor of the house."""
