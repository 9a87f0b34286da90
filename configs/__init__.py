"""Recipes: plain values over the schema's defaults, one `get_config` each."""
