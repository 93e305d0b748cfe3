"""Weights that others have published: their files as NumPy arrays, and their names as parameters of this package."""
