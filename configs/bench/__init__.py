"""Recipes that measure; every run measures again."""
