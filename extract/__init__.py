"""Extraction: models, sites, data and the engine; from a model and data to a run in a lake."""
